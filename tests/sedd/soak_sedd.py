"""Kills a small SEDD run on 2 ranks at random, resumes it each time, and tells what was lost.

    python tests/sedd/soak_sedd.py --kills 100 --launcher torchrun --launcher mpich --seed 0

Each start is the same command. It is hit at a random moment, from the first rank's appearance on,
by SIGTERM (45 %), SIGKILL (45 %) or SIGSTOP (10 %) to a random rank. Then all processes must be
gone in time, every checkpoint must be whole, and the next start goes on. A run that comes to its
end is compared, to the last bit, with one that nothing happened to, and the next one begins. Prints
a line per kill and a tally; the exit code is 0 if all was as it should be.
"""
import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "mpnn")]    # as in pytest.ini

from ddp_setup import load_checkpoint  # noqa: E402
from launchers import read_status, run_ranks, seconds_until, start_ranks  # noqa: E402
from training_runs import same_run  # noqa: E402

STEPS = 300     # optimizer steps of a run; seconds
WATCHDOG = 8.0
INIT = 20.0
GONE = 15.0   # seconds in which all must be gone after SIGKILL or SIGTERM
EXIT = 120.0  # in which a rank must end after cleanup_ddp
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


def hit(launcher, folder, draw):
    """One start in `folder` and one kill -> (signal, None if the run ended before it; seconds until
    all were gone; Result, None if it hung)."""
    kind = draw.choice(SIGNALS)
    rank = draw.randrange(2)
    lively = draw.random() < 0.7
    with start_ranks(launcher, 2, words(folder.parent), folder) as running:
        # 30 % at any moment after the ranks appeared, others from the first step on
        seconds_until(lambda: running.process.poll() is not None or
                      ("\nstep " in running.stdout() if lively else rank in running.guard_pids()),
                      120)
        time.sleep(draw.uniform(0, 2.0 if lively else 6.0))
        try:
            guard = running.guard_pids()[rank]
            pid = running.rank_pids()[rank]
            if pid == guard:    # its rank has ended: nobody ends a guard that is stopped then
                raise ProcessLookupError
            os.kill(pid, kind)
        except (KeyError, ProcessLookupError):
            return None, 0.0, running.wait(60)
        # Stopped before the ranks have met: one waits for the other for INIT + 20 s, then torchrun
        # for 30 s. Stopped in the last second: its guard ends it after EXIT seconds.
        limit = GONE + (max(INIT + 20.0 + 30.0, EXIT) if kind == signal.SIGSTOP else 0.0)
        seconds = seconds_until(lambda: not running.pids(), limit + 60.0)
        hung = running.pids() or seconds > limit
        return kind, seconds, None if hung else running.wait(5)


def soak(launcher, kills, seed, folder):
    draw = random.Random(f"{launcher} {seed}")
    tally = collections.Counter()
    problems = []
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "undisturbed").mkdir()
    result = run_ranks(launcher, 2, words(folder), folder / "undisturbed")
    assert result.returncode == 0, result.text
    done = longest = 0
    while done < kills or not tally["finished runs"]:
        current = folder / f"run-{tally['finished runs']}"
        current.mkdir(exist_ok=True)
        kind, seconds, result = (
            hit(launcher, current, draw) if done < kills else
            (None, 0.0, run_ranks(launcher, 2, words(folder), current)))
        name = kind.name if kind else "not hit"
        code = result.returncode if result else "hang"
        done = done + bool(kind)
        longest = max(longest, seconds)
        tally[name] += 1
        status = read_status(current / "run")
        step = "damaged"
        try:
            step = {path.name: load_checkpoint(str(path))["step"] for path in current.glob(
                "run/checkpoints/[!.]*.pt")}.get("last.pt", 0)   # ValueError: one is damaged
            assert result is not None, "hang"
            assert kind or code == 0, "a start that nothing hit failed"
            if status.get("code") == 0 and (kind is None or step == STEPS):
                tally["finished runs"] += 1
                same_run(folder / "undisturbed" / "run", current / "run")
        except (AssertionError, ValueError) as error:
            problems.append(error)
            print(f"PROBLEM after {name}: {str(error) or 'other metrics'}\n"
                  f"{result.text if result else ''}", flush=True)
            if len(problems) > 3:
                break
        print(f"{launcher} kill {done}/{kills}: {name}, gone after {seconds:.1f} s, exit {code}, "
              f"status {status.get('code')}, step {step}", flush=True)
    print(f"{launcher}: {dict(tally)}, gone after at most {longest:.1f} s, {len(problems)} "
          "problems (hangs, damaged checkpoints, other failures or weights)", flush=True)
    return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each launcher")
    parser.add_argument("--launcher", action="append", help="torchrun, openmpi, mpich or intel")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ok = True
    for launcher in args.launcher or ["torchrun", "mpich"]:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            ok = soak(launcher, args.kills, args.seed, Path(folder)) and ok
    sys.exit(not ok)


if __name__ == "__main__":
    main()
