"""train_sedd_ddp.py with one thing going wrong, for test_faults.py; same arguments.

Read from the environment:
    FAULT        Python text that every rank runs in step FAULT_STEP (it may use what is defined
                 here: `mine` is true on rank FAULT_RANK), or one of
                   slow          pause after each step: the fault comes from outside
                   early         an exception before torch is imported
                   early kill    SIGKILL there
                   fill          fill the disk before the checkpoint of FAULT_STEP, or a later one
    FAULT_STEP   number of the step
    FAULT_RANK   the rank at fault
    FAULT_FILE   appears when the fault comes
    PACE         seconds of a pause of `slow`; default 0.3
    KEEP_ALL     folder for a copy of each checkpoint, step_N.pt
    MEMORY_GROUP folder of a group of processes with little memory, see run_out_of_memory
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
if __name__ == "__main__":
    import ddp_guard
    ddp_guard.supervise()

import shutil
import signal
import time

RANK_VARIABLES = ("DDP_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def rank_here():
    """This rank's number, as text, before the ranks have met."""
    for name in RANK_VARIABLES:
        if name in os.environ:
            return os.environ[name]
    return "0"


fault = os.environ.get("FAULT", "")
fault_step = int(os.environ.get("FAULT_STEP", -1))
mine = rank_here() == os.environ.get("FAULT_RANK")


def fault_comes():
    open(os.environ["FAULT_FILE"], "w").close()


if fault.startswith("early") and mine:
    fault_comes()
    if fault == "early kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("on purpose")

import torch._dynamo  # noqa: F401 - the optimizer imports it, which may take longer than WATCHDOG

import train_sedd_ddp
from training import log as run_log
from training import resume

progress = run_log.RunLog.progress
micro_batch_loss = train_sedd_ddp.micro_batch_loss
save_checkpoint = resume.save_checkpoint
steps_done = 0


def progress_with_pauses(log, step, *values, **more):
    global steps_done
    progress(log, step, *values, **more)
    steps_done = step
    if fault == "slow" and step >= fault_step - 1:
        if mine and step == fault_step - 1:
            fault_comes()
        time.sleep(float(os.environ.get("PACE", 0.3)))


def loss_with_fault(*values):
    result = micro_batch_loss(*values)
    if fault not in ("slow", "fill") and steps_done == fault_step - 1:
        if mine:
            fault_comes()
        exec(fault)
    return result


def save_with_fault(path, ddp, *values, **state):
    if mine and fault == "fill" and state["step"] >= fault_step:
        fault_comes()
        fill_disk(os.path.dirname(path))
    save_checkpoint(path, ddp, *values, **state)
    if "KEEP_ALL" in os.environ and ddp.is_main and os.path.basename(path) == "last.pt":
        shutil.copy(path, os.path.join(os.environ["KEEP_ALL"], f"step_{state['step']}.pt"))


def wait():
    """Wait in Python for ever, printing dots."""
    while True:
        time.sleep(0.01)
        print(".", end="", flush=True)


def fill_disk(folder):
    try:
        with open(os.path.join(folder, "..", "filler"), "wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
    except OSError:
        return


def run_out_of_memory():
    """Among 64 MB, which the kernel gives to this process alone."""
    with open(os.path.join(os.environ["MEMORY_GROUP"], "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
    taken = []
    while True:
        taken.append(b"x" * (1 << 20))


run_log.RunLog.progress = progress_with_pauses
train_sedd_ddp.micro_batch_loss = loss_with_fault
resume.save_checkpoint = save_with_fault
if __name__ == "__main__":
    train_sedd_ddp.main(sys.argv[1:])
