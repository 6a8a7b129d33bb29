"""The key-value cache: logits of a row depend neither on how its tokens are divided among forward
passes, nor on the other rows.

Tolerance: a logit passes through about 40 sums of at most 64 terms. In another order each may
differ by 64 roundings of 2^-24 of its size, together by 40 * 64 * 2^-24 = 1.5e-4 of the largest
logit. A token at a wrong position, or one token too many or too few in attention, changes logits by
far more: see `test_the_tolerance_detects_a_wrong_position`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.part import Execution
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


def logits_without_cache(model: GPT, tokens: Tensor) -> Tensor:
    """Return the logits [V] after tokens [S], without a cache."""
    return model(tokens[None])[0, -1]


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        logits, expected, rtol=0, atol=RELATIVE * float(expected.abs().max())
    )


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_of_different_lengths_one_token_at_a_time(shape: ModelConfig) -> None:
    """Prompts of 5, 1 and 9 tokens with arbitrary padding; then six more tokens each."""
    model, tokens, lengths = build(shape).eval(), rows(3), [5, 1, 9]
    cache = KeyValueCache(shape.num_layers, 3, 15)
    new, counts = tokens[:, :9], lengths
    for _ in range(7):
        logits = model(new, cache=cache.prepare(counts, tokens.device))
        assert logits.shape == (3, 1, model.padded_vocab_size) and cache.lengths == lengths
        for row in range(3):
            assert_close(logits[row, 0], logits_without_cache(model, tokens[row, : lengths[row]]))
        new = torch.stack([row[n : n + 1] for row, n in zip(tokens, lengths, strict=True)])
        lengths, counts = [length + 1 for length in lengths], [1, 1, 1]


def test_finished_rows_are_removed() -> None:
    model, tokens = build(SHAPES["rotary, groups"]).eval(), rows(3)
    cache = KeyValueCache(3, 3, 8)
    model(tokens[:, :4], cache=cache.prepare([4, 2, 3], tokens.device))
    cache.select_rows([2, 0])
    new = torch.stack([tokens[2, 3:4], tokens[0, 4:5]])
    logits = model(new, cache=cache.prepare([1, 1], tokens.device))
    assert_close(logits[0, 0], logits_without_cache(model, tokens[2, :4]))
    assert_close(logits[1, 0], logits_without_cache(model, tokens[0, :5]))


def test_a_full_cache_raises() -> None:
    cache = KeyValueCache(1, 2, 4)
    cache.prepare([3, 1], torch.device("cpu"))
    with pytest.raises(ValueError, match="5 tokens, but the cache has 4 slots"):
        cache.prepare([2, 1], torch.device("cpu"))


def test_compiled_and_recomputing_models_run_their_blocks_as_written() -> None:
    """A compiled block would be recompiled for every length."""
    plain, tokens = build(SHAPES["learned"]).eval(), rows(2)
    plan = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
    executions = Execution(backend=pytest.fail), Execution(plan)  # nothing may be compiled
    compiled, recomputed = (build(SHAPES["learned"], execution=e).eval() for e in executions)
    expected = plain(tokens[:, :7], cache=KeyValueCache(3, 2, 7).prepare([7, 4], tokens.device))
    for model in (compiled, recomputed):
        cache = KeyValueCache(3, 2, 7).prepare([7, 4], tokens.device)
        assert torch.equal(model(tokens[:, :7], cache=cache), expected)


def test_memory_is_allocated_once_and_in_the_dtype_of_the_keys() -> None:
    model, tokens = build(SHAPES["rotary, groups"]).eval().to(torch.bfloat16), rows(2)
    cache = KeyValueCache(3, 2, 16)
    model(tokens[:, :4], cache=cache.prepare([4, 2], tokens.device))
    memory = [layer._memory for layer in cache.layers]
    assert {(part.shape, part.dtype) for part in memory} == {((2, 2, 2, 16, 8), torch.bfloat16)}
    model(tokens[:, 4:5], cache=cache.prepare([1, 1], tokens.device))
    assert all(layer._memory is part for layer, part in zip(cache.layers, memory, strict=True))
