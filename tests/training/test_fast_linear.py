"""Products of linear layers by oneDNN: the same sums."""
import pytest
import torch
import torch.nn.functional as F

from training import fast_linear


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_by_onednn_has_the_values_and_gradients_of_torch(monkeypatch, with_bias):
    monkeypatch.setattr(fast_linear, "onednn_is_faster", lambda *_: True)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, 256), torch.randn(384, 256), torch.randn(384)][:2 + with_bias]
    results = []
    for product in (F.linear, fast_linear.fast_linear):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = product(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(x.grad for x in leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-3)
