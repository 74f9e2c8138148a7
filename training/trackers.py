"""Send the rows of a run to TensorBoard and Weights & Biases, which need not be installed.

A tracker has a `name`, log(step, row) and close(). RunLog makes and calls it, and goes
on without it if it raises anything.
    row: {"step": step, name: number or text}, without null.
"""
import os
import secrets

from training.files import write_text_atomic

TRACKER_SECONDS = 60    # limit for a run to wait for a tracker's server


class TensorBoard:
    """Curves for `tensorboard --logdir RUN_DIR`. If a resumed run logs rows again, they replace the
    earlier ones."""
    name = "TensorBoard"

    def __init__(self, folder, step):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step, row):
        for name, value in row.items():
            if name == "step":
                continue
            if isinstance(value, str):
                self.writer.add_text(name, value, step)
            else:
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self):
        self.writer.close()


class Wandb:
    """A run on Weights & Biases. A resumed start continues it by its id in RUN_DIR/wandb_id.

    settings: {"project", "name", "mode"}, each optional. WANDB_MODE, or else `mode`, "offline"
    writes RUN_DIR/wandb for `wandb sync`, as on a compute node without the internet. Rows that a
    resumed run logs again appear twice there."""
    name = "W&B"

    def __init__(self, folder, settings, config):
        import wandb
        path = folder / "wandb_id"
        if not path.exists():
            write_text_atomic(path, secrets.token_hex(4) + "\n")
        limits = {}
        for name in ("login_timeout", "init_timeout", "finish_timeout"):
            if hasattr(wandb.Settings(), name):    # not in every version
                limits[name] = TRACKER_SECONDS
        self.run = wandb.init(project=settings.get("project") or "protein-ddp",
                              mode=os.environ.get("WANDB_MODE") or settings.get("mode"),
                              name=settings.get("name") or folder.name, dir=str(folder),
                              id=path.read_text().strip(), resume="allow", config=config,
                              settings=wandb.Settings(**limits))
        self.run.define_metric("*", step_metric="step")

    def log(self, step, row):
        self.run.log(row)

    def close(self):
        self.run.finish()
