"""Attention per document against a dense mask in fp64, and whole models with several documents.

The GPU's kernel is compared in 16 bit: rounding the output changes it by 2^-8 (bf16) of its size,
and softmax weights sum to 1, so the difference stays below 2^-6 times the largest value.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_zpp.data.loader import document_edges
from megatron_zpp.model.attention.document_attention import attend_documents
from tests.megatron_zpp.model.small import GPT2, LLAMA, build

EOD = 9
TOKENS = torch.tensor([[1, EOD, 2, 3, EOD, EOD, 4, 5], [6, 7, 8, 1, 2, 3, 4, EOD]])
EDGES = [0, 2, 5, 6, 8, 16]


def dense(q, k, v) -> torch.Tensor:
    """Attention [B, S, N, D] under the mask of Megatron's rule for `TOKENS`."""
    rows = []
    for row, tokens in enumerate(TOKENS):
        mask = torch.ones(8, 8, dtype=torch.bool, device=q.device).tril()
        for end in (tokens == EOD).nonzero().flatten().tolist():
            mask[end + 1 :, : end + 1] = False
        parts = (part[row].transpose(0, 1) for part in (q, k, v))
        rows.append(scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True))
    return torch.stack(rows).transpose(1, 2)


def random_heads(heads: int, **more) -> torch.Tensor:
    return torch.randn(2, 8, heads, 16, generator=torch.Generator().manual_seed(heads)).to(**more)


def test_edges_are_where_documents_begin() -> None:
    edges = document_edges(TOKENS, EOD)
    assert edges.dtype == torch.int32 and edges.tolist() == EDGES


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_values_and_gradients_are_those_of_a_dense_mask(kv_heads: int) -> None:
    parts = [random_heads(heads, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]
    results = []
    for attend in (dense, lambda *p: attend_documents(*p, document_edges(TOKENS, EOD), 0.0)):
        leaves = [part.clone().requires_grad_() for part in parts]
        out = attend(*leaves)
        (out * random_heads(4, dtype=torch.float64).cos()).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for tensor, expected in zip(*results, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_of_a_gpu(dtype: torch.dtype, kv_heads: int) -> None:
    parts = [random_heads(heads, dtype=dtype, device="cuda") for heads in (4, kv_heads, kv_heads)]
    attended = attend_documents(*parts, document_edges(TOKENS, EOD).cuda(), 0.0)
    expected = dense(*(part.double() for part in parts))
    assert (attended - expected).abs().max() < 2**-6 * expected.abs().max()


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["GPT-2", "Llama"])
def test_logits_of_a_document_depend_on_that_document_only(config) -> None:
    model = build(config).eval()
    changed = TOKENS.clone()
    changed[0, 2:5] = torch.tensor([30, 31, EOD])  # the second document of the first row
    edges = document_edges(TOKENS, EOD)
    with torch.no_grad():
        logits, changed_logits = (model(tokens, edges=edges) for tokens in (TOKENS, changed))
        mixed = model(changed)
    same = (logits == changed_logits).all(dim=2)
    assert same.tolist() == [[True] * 2 + [False] * 3 + [True] * 3, [True] * 8]
    assert not torch.equal(mixed[0, 5:], logits[0, 5:])
