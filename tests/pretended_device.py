"""A device of its own, played by the CPU: it refuses operations that mix it with the CPU's tensors.

So the paths for GPUs run from beginning to end where there is no GPU, on several ranks too (gloo
carries its tensors). It has no kernels, no streams and no speed. torch keeps the device once it is
known: import this in a process of its own. It needs what torch keeps private (names with `_`, of
torch 2.13), and may break with another torch though nothing of ours is wrong.
"""

import dataclasses
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

import training.precision
from sedd_cases import draw_and_score  # noqa: F401  (for on_device)
from training_runs import train  # noqa: F401  (for on_device)

NAME = "pretended"
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default)
# What CUDA's autocast computes in the lower precision, and what in float32, as far as we use it.
LOWER = "linear", "matmul", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"
FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "exp", "expm1", "log", "log1p", "sum",
           "sum.dim_IntList", "prod", "cumsum", "logsumexp")


class Event:
    """As torch.cuda.Event."""

    def __init__(self, enable_timing=False):
        self.seconds = None

    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1000 * (end.seconds - self.seconds)


class Backend(_DummyBackendModule):
    """As torch.cuda."""
    Event = Event
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_device_name = staticmethod(lambda device: "a pretended device")
    max_memory_allocated = staticmethod(lambda device: 0)


class OnDevice(torch.Tensor):
    """A tensor on the device. values: on the CPU."""

    @staticmethod
    def __new__(cls, values):
        return cls._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device=f"{NAME}:0")

    def __init__(self, values):
        self.values_on_cpu = values

    def tolist(self):
        return self.values_on_cpu.tolist()

    def __reduce_ex__(self, protocol):   # to be loaded with map_location="cpu"
        return self.values_on_cpu.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Sees operations without such a tensor too, which may make one."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def compute(operation, args, kwargs):
    """The operation, by the CPU, on the device where one of its tensors or `device` says so."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, OnDevice)]
    there = [x for x in tensors if not isinstance(x, OnDevice) and x.dim() > 0]   # numbers may be
    if here and there and operation not in COPIES:
        raise RuntimeError(f"{operation} of {here[0].shape} on the device and {there[0].shape}, "
                           f"which is not")
    if operation in (aten.is_pinned.default, aten._pin_memory.default):
        return operation == aten.is_pinned.default or args[0]
    device = torch.device(kwargs.get("device") or (NAME if here else "cpu"))
    if device.type == NAME and kwargs.get("generator") is not None:
        raise RuntimeError(f"{operation} on the device by a generator that is not there")
    kwargs = dict(kwargs)
    kwargs.pop("pin_memory", None)
    if kwargs.get("device"):
        kwargs["device"] = torch.device("cpu")
    given = {id(bare(x)): x for x in tensors}

    def wrapped(x):
        if not isinstance(x, torch.Tensor) or id(x) in given:   # from an operation in place
            return given.get(id(x), x)
        return OnDevice(x) if device.type == NAME else x

    return tree_map(wrapped, operation(*tree_map(bare, args), **tree_map(bare, kwargs)))


def bare(x):
    return x.values_on_cpu if isinstance(x, OnDevice) else x


def under_autocast(operation, lower):
    """`operation` as autocast runs it."""
    def run(*args, **kwargs):
        dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32

        def cast(x):
            changes = isinstance(x, OnDevice) and x.is_floating_point() and x.dtype != torch.float64
            return x.to(dtype) if changes else x

        with torch._C._ExcludeDispatchKeyGuard(
                torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))
    return run


# ---- what torch makes without asking the mode: torch.tensor(..., device=...) ----

def made_by(make):
    return lambda *shape, dtype=None, **_: OnDevice(make(*shape, dtype=dtype, device="cpu"))


def copy_from(source, target, non_blocking=False):
    bare(target).copy_(bare(source))
    return target


# ---- the device becomes known to torch ----

_setup_privateuseone_for_python_backend(NAME, Backend())
torch.autograd.set_multithreading_enabled(False)   # its threads for a device end the process
torch.__future__.set_swap_module_params_on_conversion(True)
autocasting = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
for name in LOWER + FLOAT32:
    base, _, overload = name.partition(".")
    autocasting.impl(name, under_autocast(getattr(getattr(aten, base), overload or "default"),
                                          name in LOWER))
others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
others.fallback(torch.library.fallthrough_kernel)
making = torch.library.Library("aten", "IMPL", "PrivateUse1")
for name, kernel in (("empty.memory_format", made_by(torch.empty)), ("_copy_from", copy_from),
                     ("empty_strided", made_by(torch.empty_strided))):
    making.impl(name, kernel)
training.precision.computes_bfloat16 = lambda device: True


# ---- tests run these, in a process of their own ----

def on_device(call, *arguments, ddp):
    """call(*arguments, ddp) on ranks that have a device each."""
    with PretendedDevice():
        call(*arguments, dataclasses.replace(ddp, device=torch.device(NAME, 0)))
