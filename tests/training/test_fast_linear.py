"""Linear layers by oneDNN: the same sums, and which layers take them."""

import pytest
import torch
from torch import nn

from training import fast_linear
from training.fast_linear import use_fast_linear


def product(monkeypatch, onednn, layer, x):
    """Output and the gradients of input, weight and bias, with or without oneDNN."""
    monkeypatch.setattr(fast_linear, "onednn_is_faster", lambda *_: onednn)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.square().sum().backward()
    return [t.detach().clone() for t in (y, x.grad, layer.weight.grad, layer.bias.grad)]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_layer_that_was_swapped_gives_the_product_and_gradients_of_torch(monkeypatch):
    torch.manual_seed(0)
    layer = nn.Linear(256, 384)
    x = torch.randn(2, 5, 256)
    by_torch = product(monkeypatch, False, layer, x)
    use_fast_linear(layer)
    torch.testing.assert_close(product(monkeypatch, True, layer, x), by_torch)


def test_every_linear_layer_of_a_model_is_swapped_under_its_name():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    use_fast_linear(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert isinstance(model[0], fast_linear.Linear) and isinstance(model[1][1], fast_linear.Linear)


def test_a_class_derived_from_linear_keeps_its_own_way():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = Twice(2, 2)
    use_fast_linear(layer)
    assert type(layer) is Twice
