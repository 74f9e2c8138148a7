"""Kills a small SEDD run on 2 ranks at random, resumes it each time, and tells what was lost.

    python tests/soak_sedd.py --kills 200 --launcher torchrun --launcher mpich --seed 0

Each start is the same command. It is hit at a random moment, from the first rank's appearance on,
by SIGTERM (45 %), SIGKILL (45 %) or SIGSTOP (10 %) to a random rank. Then all processes must be
gone in time (else: a hang), every checkpoint in the run directory must be whole, and the next start
goes on. A run that comes to its end is compared, to the last bit, with one that nothing happened
to, and the next one begins. Prints a line per kill and a tally; the exit code is 0 if there was no
hang, no corrupt checkpoint, no other failure and no difference.
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddp_guard import EXIT  # noqa: E402
from ddp_setup import load_checkpoint  # noqa: E402
from launchers import run_ranks, seconds_until, start_ranks  # noqa: E402
from training import same_run  # noqa: E402

STEPS, WATCHDOG, INIT = 300, 8.0, 20.0     # optimizer steps of a run; seconds
GONE = 15.0   # seconds in which all must be gone after SIGKILL or SIGTERM
CONFIG = f"""
training: {{batch_size: 8, accum: 2, n_iters: {STEPS}, eval_freq: 50, log_freq: 5,
            snapshot_freq: 10}}
optim: {{lr: 3e-3, warmup: 4, ema: 0.9}}
model: {{hidden_size: 48, n_blocks: 2, n_heads: 2, cond_dim: 16, dropout: 0.1}}
data: {{max_length: 64, val_fraction: 0.05, demo_proteins: 1000}}
memory: {{mixed_precision: false}}
monitoring: {{n_samples: 2, sample_steps: 8, watchdog_minutes: {WATCHDOG / 60}}}
"""
SIGNALS = [signal.SIGTERM] * 9 + [signal.SIGKILL] * 9 + [signal.SIGSTOP] * 2


def words(folder):
    return [ROOT / "train_sedd_ddp.py", "--config", folder / "config.yaml", "--work_dir", "run",
            "--init_timeout", str(INIT)]


def corrupt_checkpoints(run_dir):
    """What is wrong with the files in checkpoints/, in words; half-written temporary files do not
    count."""
    wrong = []
    for path in sorted((run_dir / "checkpoints").glob("[!.]*.pt")):
        try:
            load_checkpoint(str(path))
        except ValueError as e:
            wrong.append(str(e))
    return wrong


def hit(launcher, words, folder, draw):
    """One start in `folder` and one kill -> (signal, None if the run ended before it; seconds until
    all were gone; Result, None if it hung; what was printed)."""
    kind, rank, lively = draw.choice(SIGNALS), draw.randrange(2), draw.random() < 0.7
    with start_ranks(launcher, 2, words, folder) as running:
        def begun():    # 30 % at any moment after the ranks appeared, others from the first step on
            return "\nstep " in running.stdout() if lively else rank in running.rank_pids()
        seconds_until(lambda: begun() or running.process.poll() is not None, 120)
        time.sleep(draw.uniform(0, 2.0 if lively else 6.0))
        pid = running.rank_pids().get(rank)
        if pid is None or running.process.poll() is not None:
            return None, 0.0, running.wait(60), running.stdout()
        try:
            os.kill(pid, kind)
        except ProcessLookupError:
            return None, 0.0, running.wait(60), running.stdout()
        # Stopped before the ranks have met: one waits for the other for INIT + 20 s, then torchrun
        # for 30 s. Stopped in the last second: its guard ends it after EXIT seconds.
        limit = GONE + (max(INIT + 20.0 + 30.0, EXIT) if kind == signal.SIGSTOP else 0.0)
        seconds = seconds_until(lambda: not running.pids(), limit + 60.0)
        if running.pids() or seconds > limit:
            return kind, seconds, None, running.stdout() + running.stderr()
        return kind, seconds, running.wait(5), running.stdout()


def soak(launcher, kills, seed, folder):
    draw = random.Random(f"{launcher} {seed}")
    tally, longest = collections.Counter(), collections.Counter()
    (folder / "config.yaml").write_text(CONFIG)
    reference = folder / "undisturbed"
    reference.mkdir()
    result = run_ranks(launcher, 2, words(folder), reference)
    assert result.returncode == 0, result.text
    began, done = time.monotonic(), 0
    current, number = folder / "run-0", 0
    current.mkdir()
    while done < kills or not tally["finished runs"]:
        if done < kills:
            kind, seconds, result, text = hit(launcher, words(folder), current, draw)
        else:
            result = run_ranks(launcher, 2, words(folder), current)
            kind, seconds, text = None, 0.0, result.text
        name = kind.name if kind else "not hit"
        run_dir = current / "run"
        path = run_dir / "status.json"
        status = json.loads(path.read_text()) if path.exists() else {}
        step = "-"
        if kind:
            done += 1
            tally[name] += 1
            longest[name] = max(longest[name], seconds)
            tally["hangs"] += result is None
            wrong = corrupt_checkpoints(run_dir) if (run_dir / "checkpoints").exists() else []
            tally["corrupt checkpoints"] += len(wrong)
            if result is None or wrong:
                print(f"PROBLEM after {name}: {wrong or 'hang'}\n{text}", flush=True)
            if (run_dir / "checkpoints" / "last.pt").exists():
                step = load_checkpoint(str(run_dir / "checkpoints" / "last.pt"))["step"]
        print(f"{launcher} kill {done}/{kills}: {name}, gone after {seconds:.1f} s, exit "
              f"{result.returncode if result else 'hang'}, status {status.get('code')}, step "
              f"{step}", flush=True)
        if result is not None and kind is None and result.returncode != 0:
            tally["other failures"] += 1
            print(f"PROBLEM: a start that nothing hit failed\n{result.text}", flush=True)
            if tally["other failures"] > 3:
                break
        if status.get("code") == 0 and (result is None or kind is None or step == STEPS):
            tally["finished runs"] += 1
            try:
                same_run(run_dir, reference / "run")
            except AssertionError as e:
                tally["runs that differ"] += 1
                print(f"PROBLEM: a finished run differs: {str(e) or 'its metrics'}", flush=True)
            number += 1
            current = folder / f"run-{number}"
            current.mkdir()
    print(f"{launcher}: {done} kills in {(time.monotonic() - began) / 60:.1f} min: "
          + ", ".join(f"{tally[s.name]} {s.name} (gone after at most {longest[s.name]:.1f} s)"
                      for s in sorted(set(SIGNALS)))
          + f"; {tally['hangs']} hangs, {tally['corrupt checkpoints']} corrupt checkpoints, "
          f"{tally['other failures']} other failures; {tally['finished runs']} finished runs, of "
          f"which {tally['runs that differ']} with other weights or metrics", flush=True)
    return not any(tally[k] for k in ("hangs", "corrupt checkpoints", "other failures",
                                      "runs that differ"))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="over all launchers")
    parser.add_argument("--launcher", action="append",
                        help="torchrun, openmpi, mpich or intel; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chosen = args.launcher or ["torchrun", "mpich"]
    ok = True
    for k, launcher in enumerate(chosen):
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            share = args.kills // len(chosen) + (k < args.kills % len(chosen))
            ok = soak(launcher, share, args.seed, Path(folder)) and ok
    print("soak:", "nothing lost" if ok else "PROBLEMS, see above")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
