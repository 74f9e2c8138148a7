"""Commands of one result, run in this process: their code, and what they print and write.

    ran = run_tool(sample_sedd.cli, "best.pt --number 2", tmp_path)
    assert_refused(sample_sedd.cli, "best.pt --number 0", "--number 0", tmp_path)

A refusal has code 2 and one message, writes nothing, and names what the user wrote; how it is said
may change."""
import contextlib
import io
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import torch

from launchers import Printed


class Ran(NamedTuple):
    """What a command left."""
    code: int
    out: str
    err: Printed
    files: dict[str, bytes]     # {name: content} of those that are new or changed
    calls: int                  # of modules of networks: more of them with smaller batches

    @property
    def text(self):
        """All that a user sees: what was printed, names and texts of files."""
        files = [f"file {name}:\n{content.decode(errors='replace')}"
                 for name, content in sorted(self.files.items())]
        return "\n".join([self.out, self.err, *files])


def run_tool(main, words, folder):
    """Run main(list of arguments) in a folder. words: as in a shell, or a list."""
    if isinstance(words, str):
        words = shlex.split(words)
    before = contents(folder)
    out = io.StringIO()
    err = io.StringIO()
    calls = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: calls.append(1))
    code = 0
    start = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(map(str, words))) or 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        os.chdir(start)
        hook.remove()
    files = {name: content for name, content in contents(folder).items()
             if before.get(name) != content}
    return Ran(code, out.getvalue(), Printed(err.getvalue()), files, len(calls))


def contents(folder):
    """{relative name: bytes} of all files in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in Path(folder).rglob("*") if path.is_file()}


def assert_refused(main, words, named, folder):
    """The command refuses these arguments, names these words of the user's, and writes nothing.
    Returns what it says."""
    ran = run_tool(main, words, folder)
    assert ran.code == 2, ran.text
    assert ran.out == "" and ran.files == {}, ran.text
    assert ran.err.count("error: ") == 1 and "Traceback" not in ran.err, ran.err
    assert_named(named, ran.err)
    return ran.err


def assert_named(words, said):
    """Each of these words, separated by blanks, stands by itself in what is said."""
    for word in words.split():
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said), f"{word} in:\n{said}"
