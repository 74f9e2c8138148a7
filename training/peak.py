"""How fast a device multiplies matrices, measured: MFU is a fraction of this rate.

    rate = measure_matmul(matmul_rows(device), torch.float32, device, clock)      # FLOP/s
"""
import torch

# Rows of a matrix that is large enough for the full rate, and multiplied in a moment.
MATMUL_ROWS = {"cpu": 1024, "accelerator": 8192}


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
