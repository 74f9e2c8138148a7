"""bench/save.py: a checkpoint is written and read by all ranks."""
from bench.common import CONFIGS
from launchers import fork_ranks


def test_two_ranks_save_and_read_a_checkpoint_and_leave_nothing(tmp_path):
    done = fork_ranks(2, ["-m", "bench", "save", CONFIGS / "sedd_demo.yaml", "--device=cpu",
                          "--repeats=1"], tmp_path)
    assert done.returncode == 0, done.text
    assert "\nsedd_demo " in done.stdout and "2 rank(s)" in done.stdout
    assert list(tmp_path.iterdir()) == []
