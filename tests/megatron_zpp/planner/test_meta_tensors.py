"""What ops on meta tensors allocate is what they allocate on a CPU, to the byte."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.capabilities.experts.experts import products
from megatron_zpp.planner.activations import LiveBytes
from megatron_zpp.planner.parts.meta_tensors import AsOnCpus, AttentionOfCpus, run_backward
from zeropp.capabilities.experts.rows import RowsOfPairs


def attention(q, k, v, mask=None, dropout=0.0):
    options = {"is_causal": mask is None, "dropout_p": dropout, "scale": 0.5, "enable_gqa": True}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def masked(q, k, v):
    return attention(q, k, v, torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device))


def recomputed(q, k, v):
    return torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)


def normalized(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def experts(rows, weights):
    order = torch.tensor([3, 1, 2, 0, 0, 1, 3, 2]).argsort(stable=True)
    pairs = RowsOfPairs.apply(rows, order, 2)
    return products(pairs, weights, torch.full((4,), 2))


HEADS = [(2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)]
CASES = [
    (attention, HEADS),
    (masked, HEADS),
    (recomputed, HEADS),
    (lambda q, k, v: attention(q, k, v, dropout=0.1), HEADS),
    (normalized, [(3, 5, 16), (16,), (16,)]),
    (experts, [(4, 16), (4, 32, 16)]),
]


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_ops_take_what_they_do_on_a_cpu(function, shapes):
    taken = []
    for device in ("cpu", "meta"):
        tensors = [
            torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
            for shape in shapes
        ]
        with ExitStack() as modes:
            for mode in (AttentionOfCpus(), AsOnCpus()) if device == "meta" else ():
                modes.enter_context(mode)
            live = modes.enter_context(LiveBytes(tensors, counts_meta=True))
            result = function(*tensors)
            saved, forward = live.current, live.take_peak()
            run_backward(result, torch.empty_like(result))
            taken.append((saved, forward, live.take_peak(), live.current))
        assert all(tensor.grad.shape == tensor.shape for tensor in tensors)
    assert taken[0] == taken[1]
