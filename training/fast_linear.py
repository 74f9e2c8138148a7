"""Products of linear layers in float32 on a CPU of AMD, by oneDNN instead of MKL; else by torch.

torch takes MKL for products of float32 matrices, which leaves half of the vector units of AMD's
newer CPUs (Zen 5) unused. oneDNN, which torch has too, is 1.3 to 1.8 times as fast there (measured
on an EPYC with AVX-512). The sums are the same, in another order. In training oneDNN's copy of a
layer's input is kept for the backward pass, beside the input. Needs torch only.
"""
import functools

import torch
import torch.nn.functional as F

LARGEST = 2**23     # entries of an input; above, copies cost more memory and time than is gained


def fast_linear(x, weight, bias=None):
    """F.linear: x (..., n), weight (m, n), bias (m,) or None -> (..., m)."""
    if (on_cpu(x) and x.dtype == weight.dtype == torch.float32 and x.numel() <= LARGEST
            and not torch.is_autocast_enabled("cpu") and onednn_is_faster(*weight.shape)):
        return F.linear(x.to_mkldnn(), weight.contiguous(), bias).to_dense()
    return F.linear(x, weight, bias)


@functools.cache
def onednn_is_faster(n_out, n_in):
    """Whether torch takes MKL for products in float32, the CPU is one that MKL is slow on, and the
    layer is so wide that the copies to oneDNN and back are worth it."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    cpu = getattr(torch.cpu, "get_capabilities", dict)()   # older torch has no such function
    # Zen 4, which has no AVX-VNNI, takes as long for both products (measured). Without the copies
    # ProteinMPNN (width 128) is there up to 1.2 times as fast, SEDD (256) is 1 to 3 % slower.
    narrowest = 128 if cpu.get("avx_vnni") else 256
    return "AMD" in cpu.get("cpu_name", "") and min(n_out, n_in) >= narrowest


def on_cpu(x):
    """Whether to compute with x as is fastest on a CPU; torch.compile finds its own way."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
