"""Does a device compute in the precision asked for?"""
import pytest
import torch

from training.precision import choose_dtype


@pytest.mark.parametrize("request_, dtypes", [
    (False, {torch.float32}), ("float32", {torch.float32}), ("bfloat16", {torch.bfloat16}),
    (True, {torch.bfloat16, torch.float32})])    # as the CPU can
def test_a_cpu_computes_in_the_precision_asked_for(request_, dtypes):
    assert choose_dtype(request_, torch.device("cpu"))[0] in dtypes


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="float8.*expected"):
        choose_dtype("float8", torch.device("cpu"))
