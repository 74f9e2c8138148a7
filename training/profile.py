"""A trace of some steps by torch's profiler: what ran when, on the CPU and on the device of rank 0.

    profile = StepProfile(run, log)       # of the steps in training.profile, such as 10:13
    while ...:
        profile.begin(progress["step"] + 1)
        ...
    profile.close()                       # at the end, or where the run stops

Writes RUN_DIR/profile/steps_10-13.json.gz, which https://ui.perfetto.dev shows. What follows a
step, such as an evaluation, is in the trace too. A traced step takes longer, and writing the trace
counts as time of the step before, as the metrics show. A trace that cannot be written is reported;
the run goes on.
"""
import contextlib
import tempfile
from pathlib import Path

import torch

from training.config import profiled_steps
from training.files import write_whole


class StepProfile:
    """Traces the steps in training.profile. On ranks other than 0, and without it, does nothing.

    run: training.loop.Run; log: its RunLog."""

    def __init__(self, run, log):
        self.folder = run.work_dir / "profile"
        self.log = log
        self.profiler = None                 # while steps are traced
        self.began = None                    # the first step of the trace
        self.step = None                     # its last step, up to now
        self.mark = contextlib.ExitStack()   # holds what marks this step in the trace
        text = run.config.training.profile
        self.wanted = range(0)
        if text is not None and log.is_main:
            first, last = profiled_steps(text)
            self.wanted = range(first, last + 1)
            done = run.progress["step"]
            if done >= last or run.n_iters < first:
                log.say(f"training.profile {text}: no trace, as this start does steps {done + 1:,} "
                        f"to {run.n_iters:,}")

    def begin(self, step) -> None:
        """To be called before each step, given its number, from 1: begin or end the trace here."""
        self.mark.close()
        if step not in self.wanted:
            self.close()
            return
        if self.profiler is None:
            self.profiler = torch.profiler.profile()   # of the CPU, and of the device, if any
            self.profiler.start()
            self.began = step
        self.step = step
        self.mark.enter_context(torch.profiler.record_function(f"step {step}"))

    def close(self) -> None:
        """End the trace, if there is one, and write it."""
        self.mark.close()
        if self.profiler is None:
            return
        profiler = self.profiler
        self.profiler = None
        path = self.folder / f"steps_{self.began}-{self.step}.json.gz"
        try:
            profiler.stop()
            write_trace(profiler, path)
        except (OSError, RuntimeError, ValueError) as error:   # no room, or no folder
            self.log.say(f"ATTENTION: no trace of steps was made: {type(error).__name__}: {error}")
            return
        self.log.say(f"trace of steps {self.began} to {self.step}: {path}\n"
                     "  To see it, open this file in https://ui.perfetto.dev")


def write_trace(profiler, path) -> None:
    """Write what a torch.profiler.profile has recorded as packed JSON, whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "trace.json.gz")   # torch packs by the ending
        profiler.export_chrome_trace(str(packed))
        write_whole(path, lambda file: file.write(packed.read_bytes()))
