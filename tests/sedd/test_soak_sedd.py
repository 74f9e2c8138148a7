"""tests/sedd/soak_sedd.py, which is started by hand."""

import subprocess
import sys

import pytest

from launchers import ROOT, clean_environment


@pytest.mark.slow
def test_the_soak_finds_what_it_imports(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tests" / "sedd" / "soak_sedd.py", "--help"],
                          cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--kills" in done.stdout
