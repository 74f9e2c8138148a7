"""bench/data.py, and through it what a rank's start costs on many proteins."""
from bench.common import CONFIGS, write_prepared
from bench.data import in_a_child, start_a_rank
from launchers import fork_ranks
from training.config import load_config
from train_sedd_ddp import Config


def test_a_rank_starts_in_little_memory_and_time_on_many_proteins(tmp_path):
    """first: CPU seconds. reach: to a step far ahead, which must not read all before it; some 0.05
    where nothing else runs."""
    write_prepared(tmp_path / "large", 100_000)
    config = load_config(Config, CONFIGS / "sedd_uniref50.yaml")
    found = in_a_child(start_a_rank, tmp_path / "large", config, 48, 4)
    assert found["memory"] < 300 and found["first"] < 5 and found["reach"] < 10, found
    assert found["read"] < 1.1, found


def test_few_proteins_are_said_to_be_too_few_and_are_trained_on_from_both(tmp_path):
    done = fork_ranks(1, ["-m", "bench", "data", "--proteins=10", "--device=cpu", "--repeats=1",
                          "--steps=1"], tmp_path)
    assert done.returncode == 0, done.text
    assert "too few proteins" in done.stdout and "of that from memory" in done.stdout
    assert list(tmp_path.iterdir()) == []
