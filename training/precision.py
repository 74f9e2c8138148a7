"""How a network computes: the dtype of autocast, and whether torch.compile compiles its blocks."""
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from ddp_setup import choose_dtype


def choose_precision(config, ddp):
    """(dtype for autocast, text on it and on the memory limit). Raises: ValueError."""
    device = ddp.device
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        raise ValueError(f"{device} computes no float64, in which losses are summed; expected a "
                         "data-centre XPU. Give --device cpu.")
    try:
        dtype, why = choose_dtype(config.memory.mixed_precision, device)
    except RuntimeError as e:
        raise ValueError(f"config: {e}") from None
    words, share = f"{str(dtype).removeprefix('torch.')} ({why})", config.memory.max_memory_per_gpu
    if share is not None:
        set_limit = getattr(getattr(torch, device.type), "set_per_process_memory_fraction", None)
        if device.type == "cpu" or set_limit is None:
            words += f"; max_memory_per_gpu {share} has no effect on {device.type}"
        else:
            set_limit(share, device)
            words += f"; at most {share:.0%} of the device's memory"
    return dtype, words


def compile_blocks(model, setting, ddp):
    """Compile the blocks of a network by torch.compile, where that pays; returns text on it.

    In place, so that no name in a checkpoint changes. Block by block, so that all blocks share the
    compiled code, and DDP sends the gradients of one block while backward computes the next.

    setting: memory.compile. "auto": only on a CUDA device, if all that torch.compile needs is
        installed. On a CPU it did not pay; other devices are untested."""
    if not setting or setting == "auto" and ddp.device.type != "cuda":
        return ""
    if setting == "auto":
        compilers = (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")
        # Triton compiles C that includes Python.h; on Debian that is in the system's own folder.
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
        headers = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
        missing = [what for what, found in (
            ("Triton", importlib.util.find_spec("triton")),
            ("C compiler", any(map(shutil.which, compilers))), ("Python.h", headers.exists()),
            ("compute capability 7", torch.cuda.get_device_capability(ddp.device) >= (7, 0)))
            if not found]
        if missing:
            return f"; blocks not compiled: no {', no '.join(missing)} here"
    settings = torch._dynamo.config
    settings.optimize_ddp = False     # splits for DDP: not needed, as blocks are compiled apart
    settings.recompile_limit = 32     # variants: gradient or not, padding or not, one protein
    settings.specialize_float = True  # dropout can only be compiled with a constant rate
    for block in model.blocks:
        block.compile(dynamic=True)   # one compiled code for the dozens of batch shapes
    return "; blocks compiled, in the first steps"
