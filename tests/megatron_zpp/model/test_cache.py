"""The key-value cache: the logits of a row do not depend on how its tokens came, or with whom.

Tolerance: one logit goes through some 40 sums of at most 64 terms; in another order each may differ
by 64 roundings of 2^-24 of its size, all together by 40 * 64 * 2^-24 = 1.5e-4 of the largest logit.
A token at a wrong place, or one too many or too few to see, moves logits by far more than that: see
`test_the_tolerance_finds_a_token_at_a_wrong_place`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_zpp.model.cache import KeyValueCache
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.recompute import recompute
from megatron_zpp.settings.config import ModelConfig, RecomputeConfig
from tests.megatron_zpp.model.small import GPT2, LLAMA, build, rows

RELATIVE = 40 * 64 * 2**-24
SHAPES = {
    "learned": GPT2,
    "rotary, groups": LLAMA,
    "half rotary, one group": replace(LLAMA, rotary_percent=0.5, num_query_groups=1),
    "no positions": replace(GPT2, position_embedding_type="none"),
    "fp32 residual": replace(GPT2, fp32_residual_connection=True),
}
SHAPES = {name: replace(shape, init_method_std=0.2) for name, shape in SHAPES.items()}


def whole(model: GPT, tokens: Tensor) -> Tensor:
    """Logits [V] of what follows tokens [S], without a cache."""
    return model(tokens[None])[0, -1]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found, expected, rtol=0, atol=RELATIVE * float(expected.abs().max())
    )


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_of_different_lengths_one_token_at_a_time(shape: ModelConfig) -> None:
    """Prompts of 5, 1 and 9 tokens padded with whatever; then six more tokens each."""
    model, tokens, lengths = build(shape).eval(), rows(3), [5, 1, 9]
    cache = KeyValueCache(shape.num_layers, 3, 15)
    new, counts = tokens[:, :9], lengths
    for _ in range(7):
        logits = model(new, cache=cache.expect(counts, tokens.device))
        assert logits.shape == (3, 1, model.padded_vocab_size) and cache.lengths == lengths
        for row in range(3):
            assert_close(logits[row, 0], whole(model, tokens[row, : lengths[row]]))
        new = torch.stack([row[n : n + 1] for row, n in zip(tokens, lengths, strict=True)])
        lengths, counts = [length + 1 for length in lengths], [1, 1, 1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_pieces_of_any_size(shape: ModelConfig) -> None:
    """Several new tokens behind kept ones, in rows that stand at different places."""
    model, tokens = build(shape).eval(), rows(2)
    cache, done = KeyValueCache(shape.num_layers, 2, 16), [0, 0]
    for counts in ([3, 1], [2, 4], [1, 1], [5, 2]):
        new = torch.zeros(2, max(counts), dtype=torch.int64)
        for row, (start, count) in enumerate(zip(done, counts, strict=True)):
            new[row, :count] = tokens[row, start : start + count]
        done = [start + count for start, count in zip(done, counts, strict=True)]
        logits = model(new, cache=cache.expect(counts, tokens.device))
        for row in range(2):
            assert_close(logits[row, 0], whole(model, tokens[row, : done[row]]))


def test_rows_that_end_leave() -> None:
    model, tokens = build(SHAPES["rotary, groups"]).eval(), rows(3)
    cache = KeyValueCache(3, 3, 8)
    model(tokens[:, :4], cache=cache.expect([4, 2, 3], tokens.device))
    cache.keep([2, 0])
    new = torch.stack([tokens[2, 3:4], tokens[0, 4:5]])
    logits = model(new, cache=cache.expect([1, 1], tokens.device))
    assert_close(logits[0, 0], whole(model, tokens[2, :4]))
    assert_close(logits[1, 0], whole(model, tokens[0, :5]))


def test_a_full_cache_says_so() -> None:
    cache = KeyValueCache(1, 2, 4)
    cache.expect([3, 1], torch.device("cpu"))
    with pytest.raises(ValueError, match="5 tokens, but the cache has 4 slots"):
        cache.expect([2, 1], torch.device("cpu"))


def test_compiled_and_recomputing_models_run_their_blocks_as_written() -> None:
    """A compiled block would be compiled anew for every length."""
    plain, tokens = build(SHAPES["learned"]).eval(), rows(2)
    compiled, redone = build(SHAPES["learned"]).eval(), build(SHAPES["learned"]).eval()
    for block in compiled.blocks:  # as `compile_blocks` leaves them
        block.compute = None
    recompute(redone, RecomputeConfig(recompute_granularity="full", recompute_method="uniform"))
    expected = plain(tokens[:, :7], cache=KeyValueCache(3, 2, 7).expect([7, 4], tokens.device))
    for model in (compiled, redone):
        cache = KeyValueCache(3, 2, 7).expect([7, 4], tokens.device)
        assert torch.equal(model(tokens[:, :7], cache=cache), expected)


def test_memory_is_taken_once_and_in_the_type_of_the_keys() -> None:
    model, tokens = build(SHAPES["rotary, groups"]).eval().to(torch.bfloat16), rows(2)
    cache = KeyValueCache(3, 2, 16)
    model(tokens[:, :4], cache=cache.expect([4, 2], tokens.device))
    memory = [layer._memory for layer in cache.layers]
    assert {(part.shape, part.dtype) for part in memory} == {((2, 2, 2, 16, 8), torch.bfloat16)}
    model(tokens[:, 4:5], cache=cache.expect([1, 1], tokens.device))
    assert all(layer._memory is part for layer, part in zip(cache.layers, memory, strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_tolerance_finds_a_token_at_a_wrong_place(shape: ModelConfig) -> None:
    """One slot too far, which is also a slot too many to see; both move the logits."""
    model, tokens = build(shape).eval(), rows(1)
    cache = KeyValueCache(shape.num_layers, 1, 16)
    model(tokens[:, :6], cache=cache.expect([6], tokens.device))
    cache.lengths = [7]
    logits = model(tokens[:, 6:7], cache=cache.expect([1], tokens.device))
    with pytest.raises(AssertionError):
        assert_close(logits[0, 0], whole(model, tokens[0, :7]))
