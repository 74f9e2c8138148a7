"""The run folder: what stands in it, and who may write there.

    take_folder(run, ddp, fresh, ("checkpoints", "samples"))   # from here on the folder is ours

A run folder holds config.yaml, metrics.jsonl, checkpoints/ and what ddp_setup.start_watch writes:
status.json, stacks/ and `lock`, which the kernel frees when the run ends. A user's file STOP asks
the run to stop, and no run starts until it is removed.
"""
from pathlib import Path

from ddp_setup import end_watch, lock_folder, start_watch
from training.config import dump_yaml
from training.files import write_text_atomic
from training.loop import is_finished

# A folder with none of these names in it is not taken for a run folder.
MARKS = {"lock", "metrics.jsonl", "checkpoints", "config.yaml", "status.json"}


def take_folder(run, ddp, fresh, folders) -> None:
    """Take the run folder, and watch for stop requests and hangs from here on. A finished run's
    folder is left alone.

    fresh: rename a former run's folder. folders: names of subfolders in which a killed run may have
    left unfinished files.
    Raises: ValueError if another run has the folder; OSError."""
    if is_finished(run):
        end_watch(ddp)
        return
    if fresh and ddp.is_main:
        rename_former(run.work_dir)
    monitoring = run.config.monitoring
    start_watch(ddp, run.work_dir, monitoring.watchdog_minutes, run.config.training.stop_signals)
    if ddp.is_main:
        for folder in (run.work_dir, *(run.work_dir / name for name in folders)):
            for unfinished in folder.glob(".*.tmp"):   # of a killed run: the lock shows that
                unfinished.unlink(missing_ok=True)     # none runs
        write_text_atomic(run.work_dir / "config.yaml", dump_yaml(run.config))


def rename_former(run_dir) -> None:
    """Rename a run folder that is not empty to the first free NAME.oldK.

    Raises: ValueError if another run has the folder, or it cannot be renamed."""
    run_dir = run_dir.resolve()   # a link stays; what it leads to is renamed
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    lock = lock_folder(run_dir)
    number = 1
    while (old := run_dir.with_name(f"{run_dir.name}.old{number}")).exists():
        number += 1
    try:
        run_dir.rename(old)
    except OSError as e:   # for example, a volume is mounted there
        raise ValueError(f"--fresh cannot rename {run_dir}: {e.strerror}. Give another "
                         "--work_dir.") from None
    finally:
        lock.close()
    print(f"--fresh: the former run is now in {old}", flush=True)


def refuse_in_use(run_dir: Path) -> None:
    """Raise ValueError, naming it, if another run has this folder now."""
    if (run_dir / "lock").exists():
        lock_folder(run_dir).close()


def names_in(run_dir) -> list[str]:
    """Sorted names of what a run folder holds; an empty list if there is no such folder."""
    return sorted(path.name for path in run_dir.iterdir()) if run_dir.exists() else []
