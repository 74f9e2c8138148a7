"""Benchmarks of this machine, pictures and tables of the docs: python -m bench COMMAND.

    python -m bench                 # lists the commands
    python -m bench speed --help    # the options of one

From another folder: PYTHONPATH=THIS_REPOSITORY python -m bench COMMAND. Results go to stdout, words
on the progress to stderr.
"""
import sys

from bench import pictures, scale, speed, tables
from ddp_setup import BAD_INPUT

COMMANDS = {"speed": speed, "scale": scale, "pictures": pictures, "tables": tables}


def main(argv):
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(describe_commands(), flush=True)
        sys.exit(0 if argv else BAD_INPUT)
    if command not in COMMANDS:
        print(f"python -m bench: error: found {command!r}; expected one of "
              f"{', '.join(COMMANDS)} as the first argument", file=sys.stderr)
        sys.exit(BAD_INPUT)
    COMMANDS[command].main(argv[1:])


def describe_commands():
    """The help: a line for each command, which is the first one of its file."""
    lines = ["usage: python -m bench COMMAND [--help] [options]", ""]
    for name, module in COMMANDS.items():
        first_line = (module.__doc__ or "").partition("\n")[0]
        lines.append(f"  {name:<10}{first_line}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
