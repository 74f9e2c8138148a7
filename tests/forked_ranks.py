"""Runs scripts in processes forked from one that has imported torch, for launchers.ForkedRanks.

Importing torch takes seconds in every rank, and most tests of ranks need no launcher. Reads
requests as lines of JSON, and answers each by one:
  {"argv": script and arguments, "cwd", "ranks": [[environment, path of stdout, of stderr], ...]}
                                       -> [process of each]
  {"wait": processes, "timeout": seconds, "grace": seconds} -> [exit code of each]
A process that is still there at the timeout is killed: its exit code is -9. When one has failed,
the others are ended as launchers do it: by SIGTERM, and `grace` seconds later by SIGKILL (null:
they are not). A guard forks its rank, where it would start Python anew.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch._dynamo  # noqa: E402, F401 - the optimizer imports it, which takes seconds

import ddp_guard  # noqa: E402
import test_aurora_ddp  # noqa: E402, F401
import test_dtype  # noqa: E402, F401
import train_dpo_ddp  # noqa: E402, F401
import train_mpnn_ddp  # noqa: E402, F401
import train_sedd_ddp  # noqa: E402, F401

codes = {}      # {process: exit code} of those that have ended


def wait_for(pids, timeout, grace):
    """Exit codes of child processes; all of their groups are gone then."""
    running = [pid for pid in pids if pid not in codes]
    deadline = time.monotonic() + timeout
    left = set(running)
    has_failed = False
    while left and time.monotonic() < deadline:
        for pid in set(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
                if status and grace is not None and not has_failed:
                    has_failed = True
                    deadline = min(deadline, time.monotonic() + grace)
                    for other in left:
                        os.kill(other, signal.SIGTERM)
        time.sleep(0.005)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):      # nothing of it is left
            os.killpg(pid, signal.SIGKILL)
    for pid in left:
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


def serve():
    """Answer until stdin ends. Returns in a child what it has to run: (environment, argv, cwd)."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait_for(request["wait"], request["timeout"], request["grace"])
        else:
            answer = []
            for environment, *files in request["ranks"]:
                pid = os.fork()
                os.setpgid(pid, 0)      # by both, as either may be the first
                if pid == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    for stream, path in enumerate([os.devnull, *files]):
                        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), stream)
                    return environment, request["argv"], request["cwd"]
                codes.pop(pid, None)
                answer.append(pid)
        print(json.dumps(answer), flush=True)


class ForkedRank(subprocess.Popen):
    """What a guard starts: a fork of itself that runs the same script."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_):
        self.pid = os.fork()
        if self.pid == 0:
            preexec_fn()
            run_and_leave(env, args[1:], os.getcwd())


def run_and_leave(environment, argv, folder):
    """Run a script as `python argv` would, and end as it does."""
    sys.modules.pop("bdb", None)   # torch 2.8 imports it; to a guard it means a debugger
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.orig_argv = [sys.executable, *argv]
    package = argv[1] if argv[0] == "-m" else None
    sys.argv = argv[1:] if package else argv
    if package is None:     # a package is found from the root, which stands first already
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    code = 1
    try:
        try:
            if package:
                runpy.run_module(package, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = 0 if end.code is None else 1
            if isinstance(end.code, int):
                code = end.code
        except BaseException:
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            sys.excepthook(*sys.exc_info())
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)      # to take the modules apart, as the interpreter does, costs a second


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gc.freeze()     # a collection in a child would copy all of this process's memory
    work = serve()
    if work:        # in a child
        ddp_guard.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedRank})
        run_and_leave(*work)
