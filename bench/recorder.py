"""A training script of any checkout, whose steps wait until they are asked for.

    python -m bench.recorder CHECKOUT train_sedd_ddp 5 --config ...    # started by bench/against.py

For each line on stdin it takes as many steps as the number says, and prints their seconds: on a
CPU, CPU seconds of the process. It ends with stdin. What the script prints goes to stderr. Nothing
of the script is changed or called but its main(argv): torch tells of each step of an optimizer.
"""
import os
import pkgutil
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Recorder:
    """Counts steps of the first optimizer that takes one, and waits after each block of them."""

    def __init__(self, block, on_cpu, answers):
        self.block = block
        self.on_cpu = on_cpu
        self.answers = answers
        self.optimizer = None
        self.steps = 0
        self.began = None

    def __call__(self, optimizer, args, kwargs):
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:     # part of one that holds several
            return
        self.steps += 1
        if (self.steps - 1) % self.block:
            return
        if self.began is not None:
            print(self.now() - self.began, file=self.answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.began = self.now()

    def now(self):
        if self.on_cpu:
            return time.process_time()
        torch.accelerator.synchronize()
        return time.perf_counter()


def main(argv):
    checkout, script, block, *arguments = argv
    answers = sys.stdout
    sys.stdout = sys.stderr
    sys.path.insert(0, checkout)
    on_cpu = arguments[arguments.index("--device") + 1] == "cpu"
    register_optimizer_step_post_hook(Recorder(int(block), on_cpu, answers))
    pkgutil.resolve_name(f"{script}:main")(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
