"""All that is tried on a card of a new kind, in one call of a few minutes.

    python -m bench card --all out --fasta proteins.fasta.gz --pairs pairs.json

Runs the parts one after the other, each for a limited time, the most telling ones first. Without
--fasta and --pairs the training scripts take their demo data. Writes to the folder `out`:

    report.md    a row for each part: PASS, FAIL or SKIP, seconds, and what it found
    NAME.log     what a part printed
    card.json    the rows of the table
    sedd*/, dpo*/, preflight/    runs; "killed" ones were ended by SIGKILL and continued
"""
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.common import CONFIGS, say
from bench.dpo import write_demo_pdb
from ddp_setup import load_checkpoint

ROOT = CONFIGS.parent
BACKENDS = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
# Largest relative difference of weights after kill -9 and resume. On a CPU they are equal; a card
# adds some gradients in an order that changes, and training spreads the last bits.
CLOSE = 1e-2
SEDD_STEPS = 300            # of train_sedd_ddp.py
SEDD_STEPS_ON_CPU = 12
DPO_EPOCHS = 3              # of train_dpo_ddp.py
LOOK_EVERY = 0.02           # seconds between two looks for a checkpoint


@dataclass
class Part:
    """What is tried. run(log, limit): function that writes to a file, may take `limit` seconds,
    and returns a line on what it found; it raises Failed or subprocess.TimeoutExpired."""
    name: str
    run: Callable
    limit: float            # seconds


class Failed(Exception):
    """A part failed; its text says how."""


class Skipped(Exception):
    """A part cannot be tried here; its text says why."""


def run_all(args):
    """Run all parts. Returns whether none failed. args: options of python -m bench card."""
    folder = args.all
    folder.mkdir(parents=True)
    return run_parts(parts_for(args), folder, 60 * args.minutes)


def parts_for(args):
    """The Parts, in the order of their worth."""
    folder = args.all.absolute()
    device = f"--device={args.device}"
    table = ["-m", "bench", "card", device, f"--json={folder / 'card.json'}", *args.overrides,
             f"--models={','.join(args.models)}", f"--steps={args.steps}",
             f"--repeats={args.repeats}", f"--warmup={args.warmup}"]
    preflight = [ROOT / "test_aurora_ddp.py", "--claims", device,
                 f"--work_dir={folder / 'preflight'}"]
    steps = SEDD_STEPS if args.device != "cpu" else SEDD_STEPS_ON_CPU
    sedd = [ROOT / "train_sedd_ddp.py", device, f"training.n_iters={steps}",
            f"training.snapshot_freq={steps // 3}", f"training.eval_freq={steps // 2}"]
    if args.fasta:
        sedd += ["--config", CONFIGS / "sedd_cpu.yaml", "--data", args.fasta.absolute()]
    else:
        sedd += ["--config", CONFIGS / "sedd_demo.yaml"]
    dpo = [ROOT / "train_dpo_ddp.py", device, f"training.num_epochs={DPO_EPOCHS}",
           "training.snapshot_freq=5", "--config", CONFIGS / "dpo_demo.yaml"]
    if args.pairs:
        dpo += ["--train_data", args.pairs.absolute()]
    return [
        Part("world", command([*"-m bench card --world".split(), device]), 60),
        Part("preflight", command(preflight), 90),
        Part("dtypes", command([ROOT / "test_dtype.py", device]), 60),
        Part("table", command(table), 240),
        Part("sedd", resumed_run([*sedd, "--work_dir"], folder, "sedd"), 120),
        Part("dpo", resumed_run([*dpo, "--output_dir"], folder, "dpo"), 90),
        Part("sample_sedd", sample_sedd(folder, device), 60),
        Part("sample_mpnn", sample_proteinmpnn(folder, device), 60),
        Part("tests", device_tests(args.device), 120)]


def run_parts(parts, folder, seconds):
    """Run parts for that many seconds in all; print and write the report. Returns whether none
    failed."""
    end = time.monotonic() + seconds
    lines = ["| part | outcome | seconds | found |", "|---|---|---|---|"]
    failed = False
    for part in parts:
        say(f"{part.name}: at most {part.limit:.0f} s")
        start = time.monotonic()
        outcome, found = run_part(part, folder / f"{part.name}.log", end)
        failed = failed or outcome == "FAIL"
        lines.append(f"| {part.name} | {outcome} | {time.monotonic() - start:.0f} | {found} |")
        (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return not failed


def run_part(part, log, end):
    """(PASS, FAIL or SKIP, what was found) of a part. end: by time.monotonic, of all parts."""
    limit = min(part.limit, end - time.monotonic())
    if limit <= 0:
        return "FAIL", "no time was left"
    try:
        with open(log, "w") as file:
            return "PASS", part.run(file, limit)
    except Skipped as reason:
        return "SKIP", str(reason)
    except Failed as reason:
        return "FAIL", f"{reason}; last line: {last_line(log)}"
    except subprocess.TimeoutExpired:
        return "FAIL", f"not done after {limit:.0f} s; last line: {last_line(log)}"


def last_line(log):
    lines = log.read_text(errors="replace").split("\n")
    return ([line.strip() for line in lines if line.strip()] or [""])[-1]


# ---- parts: each of these returns a `run` of Part ----

def command(argv):
    """Run a command of Python to its end; its exit code must be 0."""
    def run(log, limit):
        run_python(argv, log, limit)
        return last_line(Path(log.name))
    return run


def run_python(argv, log, limit, **variables):
    """Run Python to its end. Raises: Failed if the exit code is not 0."""
    process = start_python(argv, log, **variables)
    try:
        code = process.wait(limit)
    finally:
        end_group(process)
    if code != 0:
        raise Failed(f"exit code {code}")


def start_python(argv, log, **variables):
    """Start Python in a group of processes of its own."""
    words = [sys.executable, *map(str, argv)]
    log.write(f"{' '.join(words)}\n")
    log.flush()
    return subprocess.Popen(words, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log,
                            stdin=subprocess.DEVNULL, start_new_session=True)


def end_group(process):
    """End a started process and its children by SIGKILL, if they have not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resumed_run(argv, folder, name):
    """Train to the end; train again, kill -9 after the first checkpoint, and go on; compare.

    argv: ends with the option for the run folder."""
    def run(log, limit):
        end = time.monotonic() + limit
        straight = folder / name
        killed = folder / f"{name}-killed"
        run_python([*argv, straight], log, end - time.monotonic())
        again = [*argv, killed]
        process = start_python(again, log)
        try:
            await_checkpoint(killed, process, end)
        finally:
            end_group(process)
        step = step_of(killed)
        run_python(again, log, end - time.monotonic())
        if step >= step_of(straight):
            raise Failed(f"the run had ended, at step {step}, before it was killed")
        difference = weights_differ(straight, killed)
        found = (f"killed at step {step} of {step_of(straight)} and continued: weights differ by "
                 f"{difference:.1e}")
        if not difference <= CLOSE:
            raise Failed(found)
        return found
    return run


def last_checkpoint(run_folder):
    return run_folder / "checkpoints" / "last.pt"


def await_checkpoint(run_folder, process, end):
    """Return when a run has written its first checkpoint. end: by time.monotonic."""
    while not last_checkpoint(run_folder).exists():
        if process.poll() is not None:
            raise Failed(f"exit code {process.returncode} before the first checkpoint")
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(process.args, 0)
        time.sleep(LOOK_EVERY)


def step_of(run_folder):
    return load_checkpoint(str(last_checkpoint(run_folder)))["step"]


def weights_differ(run_folder, other):
    """Relative norm of the difference between the weights of two runs."""
    weights = load_checkpoint(str(last_checkpoint(run_folder)))["model"]
    others = load_checkpoint(str(last_checkpoint(other)))["model"]
    differences = [(weights[name].double() - others[name].double()).norm() for name in weights]
    norms = [weights[name].double().norm() for name in weights]
    return float(torch.stack(differences).norm() / torch.stack(norms).norm())


def sample_sedd(folder, device):
    """Draw proteins of 100 residues with the SEDD that `resumed_run` has trained."""
    def run(log, limit):
        checkpoint = last_checkpoint(folder / "sedd")
        if not checkpoint.exists():
            raise Skipped("no model was trained")
        start = time.monotonic()
        run_python([ROOT / "sample_sedd.py", checkpoint, device, "--number=64", "--length=100",
                    f"--out={folder / 'samples.fasta'}"], log, limit)
        return f"64 proteins of 100 residues in {time.monotonic() - start:.1f} s, start included"
    return run


def sample_proteinmpnn(folder, device):
    """Design sequences with the ProteinMPNN that `resumed_run` has trained."""
    def run(log, limit):
        models = sorted((folder / "dpo").glob("*_model.pt"))
        if not models:
            raise Skipped("no model was trained")
        write_demo_pdb(folder / "made.pdb", 100)
        start = time.monotonic()
        run_python([ROOT / "sample_proteinmpnn.py", models[0], folder / "made.pdb", "--num=64",
                    device, f"--out={folder / 'designs.fasta'}"], log, limit)
        return f"64 designs of 100 residues in {time.monotonic() - start:.1f} s, start included"
    return run


def device_tests(device):
    """The tests that need a CUDA device."""
    def run(log, limit):
        if device != "cuda":
            raise Skipped("they are for CUDA")
        if not importlib.util.find_spec("pytest"):
            raise Skipped("pytest is not installed")
        run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/training", "-k",
                    "cuda_waits"], log, limit, TEST_CUDA="1")
        return last_line(Path(log.name))
    return run


# ---- a world of one rank ----

def check_world(device):
    """Print what a step in a process group of one rank, with the device's own backend, gave: its
    gradient must be that of a step without a group. Raises: ValueError if it is not."""
    backend = BACKENDS[device]
    where = torch.device(device, 0) if device != "cpu" else torch.device("cpu")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = torch.nn.Linear(64, 64).to(where)
        x = torch.randn(32, 64, device=where)
        plain(x).square().mean().backward()
        expected = plain.weight.grad.clone()
        plain.zero_grad()
        model = DistributedDataParallel(plain, device_ids=None if device == "cpu" else [0])
        model(x).square().mean().backward()
        error = float((plain.weight.grad - expected).norm() / expected.norm())
        total = torch.ones(1, device=where)
        dist.all_reduce(total)
    finally:
        dist.destroy_process_group()
    if error > 1e-6 or total.item() != 1.0:
        raise ValueError(f"a gradient under {backend} is {error:.1e} off, the sum of 1 is "
                         f"{total.item()}; expected the same gradient, and 1")
    print(f"{backend}: a world of one rank, gradient within {error:.0e}")
