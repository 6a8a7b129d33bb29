"""bf16 products computed in fp32."""

import pytest
import torch

from benchmarks.cluster.bf16_matmul import multiply_in_fp32


@pytest.mark.filterwarnings("ignore:Warning only once:UserWarning")
def test_products_in_fp32_round_as_bf16_hardware_does():
    torch.manual_seed(0)
    a, b, bias = (torch.randn(*shape).bfloat16() for shape in ((20, 30), (30, 40), (40,)))
    query = torch.randn(1, 2, 8, 16).bfloat16().requires_grad_()
    library = multiply_in_fp32()
    product, sums = a @ b, torch.addmm(bias, a, b)
    batches = torch.bmm(a[None], b[None])
    attention = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    attention.float().sum().backward()
    library._destroy()
    exact = a.float() @ b.float()
    assert torch.equal(product, exact.bfloat16()) and torch.equal(batches[0], product)
    assert torch.equal(sums, (exact + bias.float()).bfloat16())
    wide = query.detach().float().requires_grad_()
    expected = torch.nn.functional.scaled_dot_product_attention(wide, wide, wide)
    expected.sum().backward()
    assert attention.dtype == query.grad.dtype == torch.bfloat16
    torch.testing.assert_close(attention, expected.bfloat16(), rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(query.grad, wide.grad.bfloat16(), rtol=2**-6, atol=2**-6)
