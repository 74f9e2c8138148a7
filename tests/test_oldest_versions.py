"""Do the training scripts run with the oldest versions that requirements promise?

`bash jobs/test.sh --slow` installs these in .venv/floors.
"""

import json
import subprocess

import pytest

from launchers import ROOT, clean_environment
from mpnn_cases import AB, GOOD, changed

PYTHON = ROOT / ".venv" / "floors" / "bin" / "python"
TRAININGS = {
    "train_sedd_ddp.py": """
training: {batch_size: 4, n_iters: 4, eval_freq: 4, log_freq: 1, snapshot_freq: 2}
optim: {lr: 3e-3, warmup: 1, ema: 0.9}
model: {hidden_size: 32, n_blocks: 1, n_heads: 2, cond_dim: 16}
data: {max_length: 48, val_fraction: 0.05, demo_proteins: 300}
monitoring: {n_samples: 1, sample_steps: 2}
""",
    "train_dpo_ddp.py": """
training: {batch_size: 4, num_epochs: 1, log_freq: 1}
optim: {lr: 3e-4, warmup: 1}
model:
  base_model_name: random
  random: {hidden_size: 16, n_encoder: 1, n_decoder: 1, num_edges: 8}
data: {train_data: pairs.json, val_fraction: 0}
"""}


def versions(text):
    """{package: version} of lines such as numpy==1.26.0 or numpy>=1.26, zeros at the end left
    out."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    named = [line.replace(">=", "==").partition("==") for line in lines if "=" in line]
    return {package.lower(): version.removesuffix(".0") for package, _, version in named}


def test_the_oldest_versions_are_the_ones_that_requirements_name():
    base = versions((ROOT / "requirements-base.txt").read_text())
    assert versions((ROOT / "requirements-floors.txt").read_text()) == {**base, "torch": "2.8"}


@pytest.fixture
def old(small):
    """Runs words by the Python with the oldest versions, in a folder with small.pdb and pairs."""
    if not PYTHON.exists():
        pytest.skip("no .venv/floors: `bash jobs/test.sh --slow` makes it")
    (small / "pairs.json").write_text(json.dumps([GOOD, changed(**AB)]))

    def run(*words):
        done = subprocess.run([PYTHON, *words], cwd=small, env=clean_environment(), text=True,
                              capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    return run


@pytest.mark.slow
def test_the_environment_of_the_oldest_versions_holds_them(old):
    promised = versions((ROOT / "requirements-floors.txt").read_text())
    assert promised.items() <= versions(old("-m", "pip", "list", "--format=freeze")).items()


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAININGS)
def test_a_training_on_two_ranks_finishes_with_the_oldest_versions(script, old, small):
    (small / "config.yaml").write_text(TRAININGS[script])
    old(ROOT / script, "--nproc_per_node", "2", "--config", "config.yaml", "--work_dir", "run")
    assert json.loads((small / "run" / "status.json").read_text())["code"] == 0
    if script == "train_sedd_ddp.py":
        old(ROOT / "sample_sedd.py", "run/checkpoints/best.pt", "--export", "exported")
        assert list((small / "exported").glob("*.safetensors"))
