"""Runs many command lines of a training script, each in a process forked from one that has imported it.

    python tests/forked_cli.py train_sedd_ddp < cases.json > results.json

Reads a list of argument lists, writes a list of [exit code, stdout, stderr]. So a case costs what it does and
not the seconds that importing torch takes.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def run(script, argv):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 1
            try:
                script.cli(argv)
                code = 0
            except SystemExit as e:           # as the interpreter does at the end of a script
                code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
                if isinstance(e.code, str):
                    print(e.code, file=sys.stderr)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        texts = [os.pread(f.fileno(), 10**6, 0).decode(errors="replace") for f in (out, err)]
        return [os.waitstatus_to_exitcode(status), *texts]


if __name__ == "__main__":
    script = importlib.import_module(sys.argv[1])
    import torch._dynamo  # noqa: F401  - the optimizer imports it, which takes seconds
    json.dump([run(script, argv) for argv in json.load(sys.stdin)], sys.stdout)
