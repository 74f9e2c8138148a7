"""Does a start that is refused end with code 2 under a real Slurm, on two nodes?"""
import pytest

from launchers import ROOT, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wrong, word", [
    (["--data", "none.fasta"], "none.fasta"),
    (["--data", "demo", "model.no_such_key=3"], "model.no_such_key")], ids=["data", "key"])
def test_srun_ends_with_the_code_of_a_refused_start(slurm, wrong, word, tmp_path):
    argv = [ROOT / "train_sedd_ddp.py", "--config", ROOT / "configs" / "sedd_demo.yaml",
            "--device", "cpu", "--work_dir", "run", *wrong]
    result = run_ranks("srun", 4, argv, tmp_path)
    assert result.returncode == 2, result.text
    assert word in result.text and "Killed" not in result.text, result.text
    assert list(tmp_path.iterdir()) == [] and result.leftover == [], result.text
