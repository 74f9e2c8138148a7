"""How a network computes: the dtype, torch's autocast and GradScaler for it, and whether
torch.compile compiles its blocks."""
import contextlib
import importlib.util
import inspect
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from ddp_setup import Ddp

COMPILABLE = (7, 0)   # the least compute capability of CUDA devices that Triton supports
MOST_VARIANTS = 32      # of compiled code: gradient or not, padding or not, one protein
LOSS_SCALE = 2.0**16    # of float16 at the start, torch's default

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_precision(config, ddp):
    """Choose the dtype for autocast, and limit the memory that this rank may use of its device.

    Returns: (torch.dtype, text on it and on the limit). Raises: ValueError for a dtype that the
        device does not compute in, or a device without float64."""
    device = ddp.device
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        raise ValueError(f"{device} computes no float64, in which losses are summed; expected a "
                         "data-centre XPU. Give --device cpu.")
    try:
        dtype, why = choose_dtype(config.memory.mixed_precision, device)
    except RuntimeError as error:
        raise ValueError(f"config: {error}") from None
    text = f"{str(dtype).removeprefix('torch.')} ({why})"
    share = config.memory.max_memory_per_gpu
    if share is None:
        return dtype, text
    library = getattr(torch, device.type)
    set_limit = getattr(library, "set_per_process_memory_fraction", None)
    if device.type == "cpu" or set_limit is None:
        return dtype, f"{text}; max_memory_per_gpu {share} has no effect on {device.type}"
    set_limit(share, device)
    return dtype, f"{text}; at most {share:.0%} of the device's memory"


def choose_dtype(request: bool | str | None, device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype, reason) for a config's `mixed_precision`.

    request: False or None, True (bfloat16 where the device computes in it, float32 elsewhere), or a
        name of DTYPES.
    Raises: ValueError for an unknown name, RuntimeError for a dtype that the device lacks."""
    native = computes_bfloat16(device)
    if request in (False, None):
        return torch.float32, "mixed precision off"
    if request is True and native:
        return torch.bfloat16, f"{device.type} computes in bfloat16"
    if request is True:
        return torch.float32, f"{device.type} has no native bfloat16"
    if request not in DTYPES:
        raise ValueError(f"mixed_precision is {request!r}; expected true, false or one of "
                         f"{', '.join(DTYPES)}")
    if request == "bfloat16" and not native:
        if device.type != "cpu":
            raise RuntimeError(f"{device} has no bfloat16. Expected a newer device; use "
                               f"mixed_precision: float16 or false.")
        return torch.bfloat16, "asked for; emulated on this CPU, slow"
    return DTYPES[request], "asked for"


def computes_bfloat16(device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "xpu":
        return True
    with contextlib.suppress(OSError):
        words = Path("/proc/cpuinfo").read_text().split()
        return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
    return False


def autocast(dtype: torch.dtype, ddp: Ddp) -> contextlib.AbstractContextManager:
    """torch.autocast for ddp.device; float32 (and float64) mean none."""
    if dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(ddp.device.type, dtype=dtype)


def grad_scaler(dtype: torch.dtype, ddp: Ddp) -> torch.amp.GradScaler:
    """A GradScaler that scales for float16 and passes everything through otherwise.

    A script multiplies its loss by the number of ranks, by which DDP divides the gradient. The
    scale is less by this factor, so that the range of numbers in float16 is that of one rank."""
    return torch.amp.GradScaler(ddp.device.type, init_scale=LOSS_SCALE / ddp.world_size,
                                enabled=dtype == torch.float16)


def compile_blocks(model, setting, ddp):
    """Compile the blocks of a network by torch.compile, where that pays.

    In place, so that no name in a checkpoint changes. Block by block, so that all blocks share the
    compiled code, and DDP sends the gradients of one block while backward computes the next.

    Args:
        model: has its blocks in `model.blocks`.
        setting: memory.compile. "auto": only on a CUDA device, if all that torch.compile needs is
            installed. On a CPU it did not pay; other devices are untested.
    Returns: text on it, to append to a line."""
    if setting == "auto":
        if ddp.device.type != "cuda":
            return ""
        missing = missing_for_compile(ddp.device)
        if missing:
            return f"; blocks not compiled: no {', no '.join(missing)} here"
    if not setting:
        return ""
    more = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:   # torch 2.13; else 8
        more = {"recompile_limit": MOST_VARIANTS}
    for block in model.blocks:
        block.compile(dynamic=True, **more)   # one compiled code for the dozens of batch shapes
    return "; blocks compiled, in the first steps"


def missing_for_compile(device):
    """Names of what torch.compile needs for a CUDA device and does not find."""
    missing = []
    if not importlib.util.find_spec("triton"):
        missing.append("Triton")
    if os.environ.get("CC"):
        compilers = [os.environ["CC"]]
    else:
        compilers = ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        missing.append("C compiler")
    # Triton compiles C that includes Python.h; on Debian that is in the system's own folder.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not Path(sysconfig.get_paths(scheme)["include"], "Python.h").exists():
        missing.append("Python.h")
    if torch.cuda.get_device_capability(device) < COMPILABLE:
        missing.append("compute capability 7")
    return missing
