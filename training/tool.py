"""A command that computes one result on any number of ranks: its start, its output, its end.

    def run(args, ddp):
        with open_output(args.out, ddp) as write:
            write("a line\\n")                 # on rank 0

    def main(argv=None):
        run_tool("sample_sedd.py", argv, read_arguments, run)

The result is written whole or not at all. Wrong input ends with one message and exit code 2.
"""
import contextlib
import os
import sys

from ddp_setup import BAD_INPUT, abort, barrier, print0, setup_ddp
from ddp_watch import INTERRUPTED
from training.files import check_writable, write_text_atomic
from training.launch import start_ranks_if_asked
from training.problems import in_columns

PATIENCE = 6 * 3600.0   # seconds that ranks wait for a rank with more work


def run_tool(script, argv, read_arguments, run) -> None:
    """Run a command on the ranks of its launcher, or on those that its options ask for.

    Args:
        script: its name, for messages.
        argv: list of arguments; None: those of this process.
        read_arguments: function (argv) -> options, those of add_launch_arguments among them, and
            perhaps a seed. It checks what one rank can check alone.
        run: function (options, ddp). Both raise ValueError or OSError for wrong input.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = read_arguments(argv)
        start_ranks_if_asked(args, argv)
        ddp = setup_ddp(args.device, args.backend, args.seed, args.ranks, quiet=True,
                        timeout=PATIENCE, init_timeout=args.init_timeout)
    except (ValueError, RuntimeError, OSError) as error:
        end_with_error(script, error)
    with ddp:
        try:
            run(args, ddp)
        except BrokenPipeError:   # the reader of the output has ended, as in `| head`
            if ddp.world_size > 1:
                abort(ddp, "nobody reads the output any longer")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ValueError, OSError) as error:
            abort(ddp, in_columns(f"{script}: error: {error}", ddp), BAD_INPUT)
        except KeyboardInterrupt:
            abort(ddp, f"{script}: interrupted (Ctrl-C)", INTERRUPTED)


def end_with_error(script, error):
    """End with one message and the exit code for bad input."""
    print(in_columns(f"{script}: error: {error}"), file=sys.stderr)
    sys.exit(BAD_INPUT)


@contextlib.contextmanager
def open_output(path, ddp):
    """A function that writes text, on rank 0, to stdout or to `path`, which appears when whole."""
    texts = []
    if not ddp.is_main:
        yield lambda text: None
    elif path is None:
        yield write_to_stdout
    else:
        check_writable(path)
        yield texts.append
        write_text_atomic(path, "".join(texts))
        print0(ddp, f"written: {path}", file=sys.stderr)


def write_to_stdout(text):
    print(text, end="", flush=True)


def show_on_rank_0(make_text, ddp):
    """Print what make_text() returns on rank 0, while the other ranks wait: longer than they would
    at the end of the block, in cleanup_ddp."""
    if ddp.is_main:
        print(make_text(), file=sys.stderr)
    barrier(ddp, timeout=PATIENCE)
