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
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from ddp_guard import EXIT  # noqa: E402
from ddp_setup import load_checkpoint  # noqa: E402
from launchers import run_ranks, start_ranks, stolen_seconds  # noqa: E402

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


def weights(run_dir):
    state = load_checkpoint(str(run_dir / "checkpoints" / "last.pt"))
    return state["step"], {**state["model"], **{f"ema {i}": p for i,
                                                p in enumerate(state["ema"]["shadow_params"])}}


def corrupt_checkpoints(run_dir):
    """What is wrong with the files in checkpoints/, in words; half-written temporary files do not
    count."""
    wrong = []
    for path in sorted((run_dir / "checkpoints").glob("[!.]*.pt")):
        try:
            bad = zipfile.ZipFile(path).testzip()
            load_checkpoint(str(path))
            wrong += [f"{path}: {bad}"] if bad else []
        except (ValueError, zipfile.BadZipFile) as e:
            wrong.append(f"{path}: {e}")
    return wrong


def metrics_are_whole(run_dir, reference):
    texts = [(folder / "metrics.jsonl").read_text() for folder in (run_dir, reference)]
    rows = [[(row["step"], row["loss"]) for row in map(json.loads, text.splitlines())]
            for text in texts]
    return rows[0] == rows[1]


def hit(launcher, words, folder, draw):
    """One start in `folder` and one kill -> (signal, None if the run ended before it; seconds until
    all were gone; Result, None if it hung; what was printed)."""
    kind, rank, lively = draw.choice(SIGNALS), draw.randrange(2), draw.random() < 0.7
    with start_ranks(launcher, 2, words, folder) as running:
        # 30 % at any moment after the ranks appeared, the others from the first step on, where the
        # work is.
        began = time.monotonic()
        while running.process.poll() is None and time.monotonic() < began + 120:
            if "\nstep " in running.stdout() if lively else rank in running.rank_pids():
                break
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 2.0 if lively else 6.0))
        pid = running.rank_pids().get(rank)
        if pid is None or running.process.poll() is not None:
            return None, 0.0, running.wait(60), running.stdout()
        try:
            os.kill(pid, kind)
        except ProcessLookupError:
            return None, 0.0, running.wait(60), running.stdout()
        start, stolen = time.monotonic(), stolen_seconds()
        # Stopped before the ranks have met: one waits for the other for INIT + 20 s, then torchrun
        # for 30 s. Stopped in the last second: its guard ends it after EXIT seconds.
        limit = GONE + (max(INIT + 20.0 + 30.0, EXIT) if kind == signal.SIGSTOP else 0.0)

        def gone():
            return time.monotonic() - start - (stolen_seconds() - stolen)

        while running.pids() and gone() < limit + 60.0:
            time.sleep(0.05)
        seconds = gone()
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
    wanted, began, done = weights(reference / "run"), time.monotonic(), 0
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
                step = weights(run_dir)[0]
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
            same = weights(run_dir)[0] == wanted[0] and all(
                torch.equal(a, wanted[1][k]) for k, a in weights(run_dir)[1].items())
            tally["runs that differ"] += not same
            tally["metrics that differ"] += not metrics_are_whole(run_dir, reference / "run")
            number += 1
            current = folder / f"run-{number}"
            current.mkdir()
    print(f"{launcher}: {done} kills in {(time.monotonic() - began) / 60:.1f} min: "
          + ", ".join(f"{tally[s.name]} {s.name} (gone after at most {longest[s.name]:.1f} s)"
                      for s in sorted(set(SIGNALS)))
          + f"; {tally['hangs']} hangs, {tally['corrupt checkpoints']} corrupt checkpoints, "
          f"{tally['other failures']} other failures; {tally['finished runs']} finished runs, of "
          f"which {tally['runs that differ']} with other weights, {tally['metrics that differ']} "
          "with other metrics", flush=True)
    return not any(tally[k] for k in ("hangs", "corrupt checkpoints", "other failures",
                                      "runs that differ", "metrics that differ"))


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
