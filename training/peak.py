"""How fast a device multiplies matrices: measured, or published. MFU is a fraction of this rate.

    rate = measure_matmul(MATMUL_ROWS["cpu"], torch.float32, device, clock)       # FLOP/s
    rate, source = choose_peak(config.monitoring.matmul_tflops, run.dtype, device)

MFU, the model FLOP utilisation, is the FLOP that a step needs by the formula of its model, divided
by its time and by this rate (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). What a step
computes twice to save memory does not count.
"""
from typing import NamedTuple

import torch

# Rows of a matrix that is large enough for the full rate, and multiplied in a moment.
MATMUL_ROWS = {"cpu": 1024, "accelerator": 8192}


class Peak(NamedTuple):
    """TFLOP/s of products of matrices that are not sparse, with sums in float32."""
    half: float       # of bfloat16 and float16
    tf32: float
    float32: float


H100 = Peak(989.4, 494.7, 66.9)
A100 = Peak(312.0, 156.0, 19.5)
# NVIDIA's data sheets of these cards (where one tells the rate "with sparsity": half of it), and
# its white papers on GA102 (RTX 3090) and Ada (RTX 4090). By the whole name that the driver gives,
# without "NVIDIA": a part of a card (MIG) and a laptop's chip have longer names and other rates.
# There are no XPUs: what a tile reaches depends on its power. Measure those by test_dtype.py.
PUBLISHED = {
    "H200": H100, "H100 80GB HBM3": H100, "GH200 480GB": H100,
    "H100 NVL": Peak(835.5, 417.5, 60.0), "H100 PCIe": Peak(756.0, 378.0, 51.0),
    "A100-SXM4-80GB": A100, "A100-SXM4-40GB": A100, "A100 80GB PCIe": A100, "A100-PCIE-40GB": A100,
    "L40S": Peak(362.0, 183.0, 91.6), "L4": Peak(121.0, 60.0, 30.3),
    "A40": Peak(149.7, 74.8, 37.4), "A10": Peak(125.0, 62.5, 31.2),
    "GeForce RTX 4090": Peak(165.2, 82.6, 82.6), "GeForce RTX 3090": Peak(71.0, 35.6, 35.6)}


def choose_peak(given, dtype, device) -> tuple[float | None, str]:
    """The rate that MFU is counted by: as given, or as published for this card.

    given: TFLOP/s of a rank's device, or None. dtype: of the training.
    Returns: (FLOP/s, where it is from); (None, "") if it is not known."""
    if given is not None:
        return given * 1e12, "as given by monitoring.matmul_tflops"
    if device.type != "cuda":
        return None, ""
    name = torch.cuda.get_device_name(device)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    rate = published_peak(name, dtype, tf32)
    return rate, f"published for {name}" if rate else ""


def published_peak(name, dtype, tf32=False) -> float | None:
    """FLOP/s that the maker tells for a card; None for a card that is not in PUBLISHED.

    name: as the driver gives it. tf32: whether products of float32 are computed in TF32."""
    peak = PUBLISHED.get(name.removeprefix("NVIDIA "))
    if peak is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return peak.half * 1e12
    if tf32:
        return peak.tf32 * 1e12
    return peak.float32 * 1e12


def matmul_rows(device) -> int:
    """Rows of the matrices by which to measure a device."""
    return MATMUL_ROWS["cpu" if device.type == "cpu" else "accelerator"]


def measure_matmul(rows, dtype, device, clock, repeats=5) -> float:
    """FLOP/s of the product of two square matrices: in the best of some repeats of five products,
    as other work on a machine only takes from the rate.

    clock: function () -> seconds, after the device has finished its work."""
    a = torch.randn(rows, rows, device=device).to(dtype)
    b = torch.randn(rows, rows, device=device).to(dtype)
    for _ in range(3):   # warm-up
        a @ b
    times = []
    for _ in range(repeats):
        start = clock()
        for _ in range(5):
            a @ b
        times.append(clock() - start)
    return 5 * 2 * rows**3 / min(times)
