"""The training scripts of two checkouts of this project, in turns: speed --against CHECKOUT.

Each side is a process that runs its own script and config on the demo data. After every few steps
it waits until it is its turn again (bench/recorder.py), so both are measured in the same minutes; a
third process, of this checkout again, shows by how much equal code differs. Rates are steps per
second, on a CPU per CPU second of one thread. It needs no more of the other checkout than its
commands. Give --repeats 20 to tell 3 % apart.
"""
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 5                   # steps of a turn
WARM_UP = 2                 # turns that are not counted
DATA = ["data.val_fraction=0", "training.log_freq=1000000", "monitoring.watchdog_minutes=0"]
SEDD = ["training.n_iters=1000000", "training.eval_freq=1000000", "training.snapshot_freq=1000000",
        "monitoring.n_samples=0", "data.demo_proteins=5000", *DATA]
PUBLISHED = [f"model.random.{size}" for size in ("hidden_size=128", "n_encoder=3", "n_decoder=3",
                                                 "num_edges=48")]
DPO = ["training.num_epochs=1000000", "monitoring.n_designs=0", "data.demo_structures=24",
       "data.demo_pairs=200", *PUBLISHED, *DATA]     # 300 steps from one checkpoint to the next
ROWS = {    # title: (what, script, config, overrides)
    "SEDD step, sedd_demo.yaml": ("sedd", "train_sedd_ddp", "sedd_demo.yaml", SEDD),
    "SEDD step, sedd_cpu.yaml": ("sedd", "train_sedd_ddp", "sedd_cpu.yaml",
                                 ["optim.decay=none", "optim.decay_steps=null", *SEDD]),
    "DPO step, dpo_demo.yaml, random order": ("dpo", "train_dpo_ddp", "dpo_demo.yaml", DPO),
    "DPO step, dpo_demo.yaml, fixed order": ("dpo", "train_dpo_ddp", "dpo_demo.yaml",
                                             ["loss.order=fixed", *DPO])}


def compare(options):
    """Print the table. Raises: ValueError."""
    other = options.against.absolute()
    if not (other / "train_sedd_ddp.py").is_file():
        raise ValueError(f"--against {options.against}: found no train_sedd_ddp.py there; expected "
                         "a checkout of this project")
    second = "CPU second" if options.device == "cpu" else "second"
    print(f"{ROOT.name} against {other.name}, {options.device}, medians of {options.repeats} turns "
          f"of {BLOCK} steps\n\n| steps per {second} | that | this | ratio (range) | this against "
          "itself |\n|---|---|---|---|---|", flush=True)
    for title, (what, script, config, overrides) in ROWS.items():
        if what in options.what:
            print(row_of(title, other, [script, config, *overrides], options), flush=True)


def row_of(title, other, words, options):
    """A line of the table. words: script, config, overrides."""
    times = {"that": [], "this": [], "again": []}
    order = list(times)
    with contextlib.ExitStack() as stack:
        sides = {name: Side(other if name == "that" else ROOT, words, options.device)
                 for name in times}
        for side in sides.values():
            stack.callback(side.end)
        for turn in range(WARM_UP + options.repeats):
            print(f"{title}: turn {turn + 1 - WARM_UP} of {options.repeats}", file=sys.stderr,
                  flush=True)
            order.append(order.pop(0))      # none always comes after the same one
            for name in order:
                seconds = sides[name].take_turn()
                if turn >= WARM_UP:
                    times[name].append(seconds)
    rates = {name: BLOCK / statistics.median(found) for name, found in times.items()}
    ratios = [that / this for that, this in zip(times["that"], times["this"])]
    itself = [again / this for again, this in zip(times["again"], times["this"])]
    return (f"| {title} | {rates['that']:.4g} | {rates['this']:.4g} "
            f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) "
            f"| {statistics.median(itself):.3f} |")


class Side:
    """A training script of a checkout that takes steps when it is told to."""

    def __init__(self, checkout, words, device):
        script, config, *overrides = words
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        run = Path(self.folder.name, "run")
        command = [sys.executable, "-m", "bench.recorder", checkout, script, BLOCK, "--config",
                   checkout / "configs" / config, "--work_dir", run, "--device", device, *overrides]
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.said = open(Path(self.folder.name, "said"), "w+")
        self.process = subprocess.Popen(
            [str(word) for word in command], cwd=self.folder.name, env=os.environ | variables,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True)

    def take_turn(self):
        """Seconds of BLOCK steps. Raises: ValueError if the script has ended."""
        with contextlib.suppress(BrokenPipeError):
            print("go", file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.said.seek(0)
            raise ValueError(f"{' '.join(self.process.args)} has ended:\n{self.said.read()}")
        return float(line)

    def end(self):
        self.process.kill()
        self.process.communicate()
        self.said.close()
        self.folder.cleanup()
