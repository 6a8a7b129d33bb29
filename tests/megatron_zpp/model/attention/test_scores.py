"""Windows, ALiBi, caps, sinks and scales equal their formulas, whatever path computes them."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.model.attention import prefix_attention
from megatron_zpp.model.attention import scores as module
from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.attention.document_attention import attend_documents
from megatron_zpp.model.attention.prefix_attention import attend_last
from megatron_zpp.model.attention.scores import Scores, alibi_slopes

HEADS, GROUPS, LENGTH, CHANNELS = 6, 2, 23, 8
SINKS = torch.tensor([-1.0, 0.0, 0.5, 2.0, 5.0, -30.0])
KINDS = {
    "scale": Scores(scale=0.1),
    "window": Scores(window=5),
    "window of one": Scores(window=1),
    "a window of all but one": Scores(window=LENGTH - 1),
    "cap": Scores(cap=1.5, scale=0.7),
    "alibi": Scores(alibi_heads=(HEADS, 0, HEADS)),
    "sinks": Scores(sinks=SINKS),
    "sinks, a window": Scores(sinks=SINKS, window=5, scale=0.3),
    "sinks, a window of all": Scores(sinks=SINKS, window=LENGTH),
    "sinks, alibi": Scores(sinks=SINKS, alibi_heads=(HEADS, 0, HEADS)),
    "all": Scores(window=6, cap=2.0, scale=0.4, alibi_heads=(2 * HEADS, HEADS, HEADS)),
}
CLOSE = dict(rtol=0, atol=1e-6)  # sums of 23 terms of order one in fp32, against fp64


def draw() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [2, N, S, D], keys and values [2, K, S, D]."""
    generator = torch.Generator().manual_seed(2)
    heads = HEADS, GROUPS, GROUPS
    return tuple(torch.randn(2, count, LENGTH, CHANNELS, generator=generator) for count in heads)


def formula(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Return the attention of the last tokens, one query and one head at a time, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    result = torch.empty_like(q)
    num_keys, group_size = k.shape[2], q.shape[1] // k.shape[1]
    for row in range(len(q)):
        for head in range(q.shape[1]):
            keys, values = k[row, head // group_size], v[row, head // group_size]
            for index in range(q.shape[2]):
                place = num_keys - q.shape[2] + index
                first = 0 if scores.window is None else max(0, place - scores.window + 1)
                seen = slice(first, place + 1)
                x = keys[seen] @ q[row, head, index] * (scores.scale or CHANNELS**-0.5)
                if scores.cap is not None:
                    x = scores.cap * torch.tanh(x / scores.cap)
                if scores.alibi_heads is not None:
                    x = x - slope(head, scores) * torch.arange(place - first, -1, -1)
                if scores.sinks is not None:
                    x = torch.cat((x, scores.sinks[head : head + 1].double()))
                result[row, head, index] = x.softmax(0)[: len(values[seen])] @ values[seen]
    return result.float()


def slope(head: int, scores: Scores) -> float:
    num_heads, first, _ = scores.alibi_heads
    return published_slopes(num_heads)[first + head]


def published_slopes(num_heads: int) -> list[float]:
    """Return what the paper's authors publish, a recursion."""
    if math.log2(num_heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [start ** (index + 1) for index in range(num_heads)]
    power = 2 ** math.floor(math.log2(num_heads))
    return published_slopes(power) + published_slopes(2 * power)[0::2][: num_heads - power]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 71])
def test_slopes(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads, 0, num_heads, torch.device("cpu"))
    assert slopes.tolist() == pytest.approx(published_slopes(num_heads), rel=1e-6)


@pytest.mark.parametrize("num_queries", [LENGTH, 9, 1])
@pytest.mark.parametrize("block", [512, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_tokens(kind, block, num_queries, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    q, k, v = draw()
    q = q[:, :, -num_queries:]
    attended = attend_last(q, k, v, 0.0, KINDS[kind])
    torch.testing.assert_close(attended, formula(q, k, v, KINDS[kind]), **CLOSE)


@pytest.mark.parametrize("kind", ["sinks", "sinks, a window"])
def test_gradients_with_sinks(kind: str) -> None:
    """Of queries, keys, values and sinks, for a loss that is not the same for all results."""
    factors, gradients = draw()[0][:, :, -9:], []
    for attend in (formula, partial(attend_last, dropout=0.0)):
        leaves = [each.clone().requires_grad_() for each in (*draw(), SINKS)]
        q, k, v, sinks = leaves
        attended = attend(q[:, :, -9:], k, v, scores=replace(KINDS[kind], sinks=sinks))
        gradients.append(torch.autograd.grad((attended * factors).sum(), leaves))
    for name, expected, got in zip(("q", "k", "v", "sinks"), *gradients, strict=True):
        assert expected.abs().max() > 0.1, name
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_documents(kind: str) -> None:
    q, k, v = draw()
    edges = [0, 4, 5, LENGTH, LENGTH + 11, 2 * LENGTH]  # in the concatenated rows
    by_token = (part.transpose(1, 2) for part in (q, k, v))
    tensor = torch.tensor(edges, dtype=torch.int32)
    attended = attend_documents(*by_token, tensor, 0.0, scores=KINDS[kind]).transpose(1, 2)
    for first, end in zip(edges, edges[1:], strict=False):
        row, part = first // LENGTH, slice(first % LENGTH, first % LENGTH + end - first)
        own = (each[row : row + 1, :, part] for each in (q, k, v))
        expected = formula(*own, KINDS[kind])
        torch.testing.assert_close(attended[row : row + 1, :, part], expected, **CLOSE)


@pytest.mark.parametrize("counts", [[(9, 4), (1, 1), (13, 7)], [(5, 5), (1, 1), (1, 1), (16, 16)]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_rows_of_different_lengths(kind: str, counts: list) -> None:
    """The rows are filled in steps of several tokens and of one."""
    q, k, v = draw()
    cache, lengths = KeyValueCache(1, 2, LENGTH), [0, 0]
    for step in counts:
        cache.prepare(step, torch.device("cpu"))
        width = max(step)
        new = [torch.full((2, width, *part.shape[1::2]), 9.0) for part in (q, k, v)]
        for row, count in enumerate(step):
            own = slice(lengths[row], lengths[row] + count)
            for part, whole in zip(new, (q, k, v), strict=True):
                part[row, :count] = whole[row, :, own].transpose(0, 1)
        attended = cache.layers[0].attend(*new, KINDS[kind])
        for row, count in enumerate(step):
            lengths[row] += count
            seen = [part[row : row + 1, :, : lengths[row]] for part in (q, k, v)]
            seen[0] = seen[0][:, :, -count:]
            expected = formula(*seen, KINDS[kind])[0].transpose(0, 1)
            torch.testing.assert_close(attended[row, :count], expected, **CLOSE)


def test_a_window_of_everything_is_none() -> None:
    q, k, v = draw()
    plain = attend_last(q, k, v, 0.0)
    assert torch.equal(attend_last(q, k, v, 0.0, Scores(window=LENGTH)), plain)
    assert not torch.equal(attend_last(q, k, v, 0.0, Scores(window=LENGTH - 1)), plain)


@pytest.mark.parametrize("kind", ["cap", "window"])
def test_dropout_of_scores(kind: str) -> None:
    """Half of the weights are dropped: the mean over many draws is that without dropout."""
    q, k, v = (part[:1] for part in draw())
    torch.manual_seed(1)
    scores = replace(KINDS[kind], window=8)
    many = [part.expand(3000, -1, -1, -1) for part in (q, k, v)]
    mean = attend_last(*many, 0.5, scores).mean(0)
    # Σ w²v² ≤ max v² ≈ 9 bounds the variance of one draw: 3 / √3000 = 0.055 is one deviation.
    torch.testing.assert_close(mean, attend_last(q, k, v, 0.0, scores)[0], rtol=0, atol=0.3)


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
