"""Does a device compute in the precision asked for?"""
import pytest
import torch

from ddp_setup import Ddp
from training.precision import autocast, choose_dtype, grad_scaler


@pytest.mark.parametrize("request_, dtypes", [
    (False, {torch.float32}), ("float32", {torch.float32}), ("bfloat16", {torch.bfloat16}),
    (True, {torch.bfloat16, torch.float32})])    # as the CPU can
def test_a_cpu_computes_in_the_precision_asked_for(request_, dtypes):
    assert choose_dtype(request_, torch.device("cpu"))[0] in dtypes


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="float8.*expected"):
        choose_dtype("float8", torch.device("cpu"))


def test_autocast_computes_in_bfloat16():
    with autocast(torch.bfloat16, Ddp()):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_of_float32_is_none():
    with autocast(torch.float32, Ddp()):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_scaled_for_float16_alone(dtype):
    assert grad_scaler(dtype, Ddp()).is_enabled() == (dtype == torch.float16)
