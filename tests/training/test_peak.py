"""The rate of a device's matrix products: published, given, measured."""
import itertools

import pytest
import torch

from training.peak import choose_peak, measure_matmul, published_peak

CPU = torch.device("cpu")


@pytest.mark.parametrize("name, dtype, tf32, expected", [   # TFLOP/s, from NVIDIA's data sheets
    ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312),
    ("A100-PCIE-40GB", torch.float16, False, 312),          # an older driver
    ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156),
    ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5),
    ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 1979 / 2)])   # half of that with sparsity
def test_a_published_rate_is_of_dense_products_in_the_dtype(name, dtype, tf32, expected):
    assert published_peak(name, dtype, tf32) == pytest.approx(expected * 1e12, rel=1e-3)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100",
                                  "NVIDIA GeForce RTX 4090 Laptop GPU", "Some XPU"])
def test_a_part_of_a_card_has_no_published_rate(name):
    assert published_peak(name, torch.bfloat16) is None


def test_a_given_rate_is_taken():
    assert choose_peak(0.25, torch.float32, CPU)[0] == 0.25e12


def test_a_cpu_has_no_published_rate():
    assert choose_peak(None, torch.float32, CPU) == (None, "")


def test_a_rate_is_measured_by_the_best_time():
    """Five products of 10 rows are 5 x 2 x 10^3 FLOP, here in 1, 2 or 100 seconds."""
    clock = iter(itertools.accumulate([0, 1, 0, 100, 0, 2])).__next__
    assert measure_matmul(10, torch.float32, CPU, clock, repeats=3) == 10_000 / 1
