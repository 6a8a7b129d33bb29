"""The last tokens of a sequence attend to what the whole sequence does."""

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.model.attention import prefix_attention
from megatron_zpp.model.attention.prefix_attention import attend_last


@pytest.mark.parametrize("num_queries", [1, 7, 16, 33, 48, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_the_whole(num_queries, dtype, monkeypatch):
    monkeypatch.setattr(prefix_attention, "BLOCK", 16)
    prefix_attention.lower_right_mask.cache_clear()
    generator = torch.Generator().manual_seed(num_queries)
    q, k, v = (
        torch.randn(2, heads, 50, 8, generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = expected[:, :, -num_queries:]
    attended = attend_last(q[:, :, -num_queries:], k, v, 0.0)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    gradients = torch.autograd.grad(attended.square().sum(), (q, k, v))
    limits = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for tensor, other in zip((attended, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(tensor, other, **limits)
    prefix_attention.lower_right_mask.cache_clear()
