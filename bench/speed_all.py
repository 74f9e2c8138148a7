"""All that tells whether a new card serves, in one call of a few minutes: speed --all.

Runs the parts one after the other, each in processes of its own and for a limited time, the most
telling ones first. A part that fails is named, and the rest goes on; exit code 3 then.

    world      a process group of one rank, in the device's own backend: DDP's gradient
    sedd, dpo  a short training; the same, killed by SIGKILL after a checkpoint and continued:
               equal weights, to the bit on a CPU
    compile    a training whose blocks torch compiles; not on a CPU
    machine    test_aurora_ddp.py on one rank, and test_dtype.py
    speed ...  the tables of speed, on a card also with the networks of configs/sedd_uniref50*.yaml

Prints the speeds as one table with the card's name, then a table of the parts. Writes to --folder:
report.md (what is printed), NAME.log (what a part printed), and the runs.
"""
import contextlib
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

from ddp_setup import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
BACKENDS = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
FAILED = 3                  # exit code
# Largest relative difference of weights after kill -9 and resume. On a CPU they are equal; a card
# adds some gradients in an order that changes, and training spreads the last bits.
CLOSE = {"cpu": 0.0, "cuda": 1e-2, "xpu": 1e-2}
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


def run(options):
    """Run all parts. Returns the exit code. Raises: ValueError."""
    folder = options.folder.absolute()
    if folder.exists():
        raise ValueError(f"--folder {options.folder} exists; expected a new folder")
    folder.mkdir(parents=True)
    return run_parts(parts_on(options.device, folder), folder, 60 * options.minutes)


def parts_on(device, folder):
    """The Parts for a device, in the order of their worth; together 9 minutes."""
    option = f"--device={device}"
    small = device == "cpu"
    steps = 12 if small else 150
    sedd = [ROOT / "train_sedd_ddp.py", "--config", CONFIGS / "sedd_demo.yaml", option,
            f"training.n_iters={steps}", f"training.snapshot_freq={steps // 3}",
            f"training.eval_freq={steps}", "training.eval_samples=1", "monitoring.n_samples=1",
            "data.demo_proteins=2000"]
    dpo = [ROOT / "train_dpo_ddp.py", "--config", CONFIGS / "dpo_demo.yaml", option,
           "training.num_epochs=1", "training.snapshot_freq=5", "monitoring.n_designs=0"]
    world = ["-c", f"from bench.speed_all import check_world; check_world({device!r})"]
    claims = [ROOT / "test_aurora_ddp.py", option]
    parts = [Part("world", command(world), 30),
             Part("sedd", resumed_run([*sedd, "--work_dir"], folder, "sedd", device), 80),
             Part("dpo", resumed_run([*dpo, "--output_dir"], folder, "dpo", device), 60)]
    if not small:
        compiled = [*sedd, "memory.compile=true", f"--work_dir={folder / 'compiled'}"]
        parts.append(Part("compile", command(compiled), 60))
    parts += [Part("machine", command(claims), 40),
              Part("dtypes", command([ROOT / "test_dtype.py", option]), 80 if small else 30)]
    return parts + speeds_on(option, small)


def speeds_on(option, small):
    """The Parts that measure speeds; on a CPU of small networks, in few turns."""
    if small:
        config = CONFIGS / "sedd_demo.yaml"
        return [Part("speed sedd", speed(["sedd", option, "--repeats=2", "--config", config]), 60),
                Part("speed dpo", speed(["dpo", "tables", option, "--repeats=1", "--quick"]), 60),
                Part("speed sample", speed(["sample", option, "--repeats=1", "--batch=1",
                                            "--lengths=50", "--sample_steps=8"]), 60)]
    parts = [Part("speed sedd", speed(["sedd", option, "--repeats=3"]), 50)]
    for name in ("sedd_uniref50_38m", "sedd_uniref50"):
        words = ["sedd", option, "--repeats=3", "--steps=5", "--config", CONFIGS / f"{name}.yaml"]
        parts.append(Part(f"speed {name}", speed(words), 60))
    samples = ["sample", option, "--repeats=2", "--batch=8"]
    return [*parts, Part("speed dpo", speed(["dpo", "tables", option, "--repeats=3"]), 40),
            Part("speed sample", speed(samples), 50)]


def run_parts(parts, folder, seconds):
    """Run parts for that many seconds in all; print and write the report. Returns FAILED if one
    failed, else 0."""
    end = time.monotonic() + seconds
    lines = ["| part | outcome | seconds | found |", "|---|---|---|---|"]
    table = []
    code = 0
    for part in parts:
        print(f"{part.name}: at most {part.limit:.0f} s", file=sys.stderr, flush=True)
        start = time.monotonic()
        log = folder / f"{part.name.replace(' ', '_')}.log"
        outcome, found = run_part(part, log, end)
        if outcome == "FAIL":
            code = FAILED
        lines.append(f"| {part.name} | {outcome} | {time.monotonic() - start:.0f} | {found} |")
        head, rows = table_of(log)
        table += rows if table else [*head, *rows]
        (folder / "report.md").write_text("\n".join([*table, "", *lines]) + "\n")
    print("\n".join([*table, "", *lines]), flush=True)
    return code


def run_part(part, log, end):
    """(PASS or FAIL, what was found) of a part. end: by time.monotonic, of all parts."""
    limit = min(part.limit, end - time.monotonic())
    if limit <= 0:
        return "FAIL", "no time was left"
    try:
        with open(log, "w") as file:
            return "PASS", part.run(file, limit)
    except Failed as reason:
        return "FAIL", f"{reason}; last line: {last_line(log)}"
    except subprocess.TimeoutExpired:
        return "FAIL", f"not done after {limit:.0f} s; last line: {last_line(log)}"


def last_line(log):
    lines = [line.strip() for line in log.read_text(errors="replace").split("\n")]
    return ([line for line in lines if line] or [""])[-1].replace("|", "/")


def table_of(log):
    """(head, rows) of a table that `speed` has printed to a log: lines. ([], []): none."""
    if not log.exists():
        return [], []
    lines = log.read_text(errors="replace").split("\n")
    for k, line in enumerate(lines):
        if line.startswith("| per "):
            rows = [row for row in lines[k + 2:] if row.startswith("|")]
            return lines[max(k - 2, 0):k + 2], rows
    return [], []


# ---------------------------------------------------------------- parts: functions `run` of Part
def command(argv):
    """Run a command of Python to its end; its exit code must be 0."""
    def run(log, limit):
        run_python(argv, log, limit)
        return last_line(Path(log.name))
    return run


def speed(words):
    """Run speed with these words."""
    def run(log, limit):
        run_python(["-m", "bench", "speed", *words], log, limit)
        _, rows = table_of(Path(log.name))
        return f"{len(rows)} rows"
    return run


def run_python(argv, log, limit):
    """Run Python to its end. Raises: Failed if the exit code is not 0."""
    process = start_python(argv, log)
    try:
        code = process.wait(limit)
    finally:
        end_group(process)
    if code != 0:
        raise Failed(f"exit code {code}")


def start_python(argv, log):
    """Start Python in a group of processes of its own."""
    words = [sys.executable, *map(str, argv)]
    log.write(f"{' '.join(words)}\n")
    log.flush()
    return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                            start_new_session=True)


def end_group(process):
    """End a started process and its children by SIGKILL, if they have not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resumed_run(argv, folder, name, device):
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
        found = f"killed at step {step} of {step_of(straight)} and continued: weights "
        found += f"differ by {difference:.1e}" if difference else "equal to the bit"
        if not difference <= CLOSE[device]:
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
