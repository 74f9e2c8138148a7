"""Runs scripts in processes forked from one that has imported torch, for launchers.fork_ranks.

Importing torch takes seconds in every rank, and most tests of ranks need no launcher. Reads a run
per line, as JSON: {"argv": script and arguments, "cwd", "ranks": [environment of each],
"timeout": seconds}. Writes for each a line of JSON: [[exit code, stdout, stderr] of each rank].
A rank that is still there at the timeout, or GRACE seconds after another has failed, is killed: its
exit code is -9.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch._dynamo  # noqa: E402, F401 - the optimizer imports it, which takes seconds
import test_aurora_ddp  # noqa: E402, F401
import test_dtype  # noqa: E402, F401
import train_dpo_ddp  # noqa: E402, F401
import train_sedd_ddp  # noqa: E402, F401

GRACE = 3.0     # for the other ranks, as launchers have one


def wait_for(pids, timeout):
    """{pid: exit code} of child processes; all of their groups are gone then."""
    codes, deadline = {}, time.monotonic() + timeout
    try:
        while len(codes) < len(pids) and time.monotonic() < deadline:
            for pid in set(pids) - codes.keys():
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if status:
                        deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.005)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):      # nothing of it is left
                os.killpg(pid, signal.SIGKILL)
    for pid in set(pids) - codes.keys():
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes


def text_of(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def serve():
    """Answer until stdin ends. Returns in a child what it has to run: (environment, argv, cwd)."""
    for line in sys.stdin:
        run = json.loads(line)
        ranks = []
        for environment in run["ranks"]:
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for file, stream in ((open(os.devnull), 0), (out, 1), (err, 2)):
                    os.dup2(file.fileno(), stream)
                return environment, run["argv"], run["cwd"]
            ranks.append((pid, out, err))
        codes = wait_for([pid for pid, _, _ in ranks], run["timeout"])
        print(json.dumps([[codes[pid], text_of(out), text_of(err)] for pid, out, err in ranks]),
              flush=True)


def run(environment, argv, folder):
    """Run a script as `python argv` would, and return its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gc.freeze()     # a collection in a child would copy all of this process's memory
    if work := serve():
        code = run(*work)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)      # to take the modules apart, as the interpreter does, costs a second
