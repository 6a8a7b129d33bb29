"""Sampling: reproducible, bounded by top-k and the vocabulary, ended by the end of document."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.generate import generate, sample
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer
from tests.megatron_zpp.model.small import GPT2, LLAMA, VOCABULARY, build
from tests.ranks import ranks
from zeropp.errors import InputError

TOKENIZER = NullTokenizer(VOCABULARY)
PEAKED = replace(GPT2, init_method_std=0.3)


def ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def favour(model: GPT, token: int) -> GPT:
    """Make `token` the likeliest after anything by far."""
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.copy_(10_000 * model.tokens.weight[token])
    return model


def test_seed_decides() -> None:
    model = build(GPT2)
    first, again, other = (
        generate(model, TOKENIZER, "1 2 3", max_new_tokens=20, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert model.training


def test_greedy_is_the_argmax_of_the_cropped_context() -> None:
    """Beyond its 16 positions the model sees the last 16 tokens; by hand, token by token."""
    for config in (PEAKED, replace(LLAMA, init_method_std=0.3)):
        model = build(config).eval()
        expected = [3, 1, 4, 1, 5]
        with torch.no_grad():
            for _ in range(20):
                logits = model(torch.tensor([expected[-16:]]))[0, -1, : VOCABULARY - 1]
                expected.append(int(logits.argmax()))
        text = generate(model, NoEnd(), "3 1 4 1 5", max_new_tokens=20, temperature=0)
        assert ids(text) == expected[5:]
        assert not model.training


class NoEnd(NullTokenizer):
    """Its end of document lies outside what is drawn from."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.vocab_size = VOCABULARY - 1


def test_stops_at_the_end_of_document() -> None:
    ending = favour(build(GPT2), TOKENIZER.eod)
    assert generate(ending, TOKENIZER, "1 2", max_new_tokens=5) == ""
    going_on = favour(build(GPT2), 7)
    assert generate(going_on, TOKENIZER, "1 2", max_new_tokens=5) == "7 7 7 7 7"


def test_padded_entries_are_never_drawn() -> None:
    """Entries 50 to 63 exist in the model only: no text is made of them."""
    model = favour(build(GPT2), 60)
    drawn = ids(generate(model, TOKENIZER, "1", max_new_tokens=30, temperature=50.0))
    assert drawn and max(drawn) < VOCABULARY


def test_empty_prompt_starts_a_document() -> None:
    model = build(PEAKED)
    options = dict(max_new_tokens=8, seed=3)
    assert generate(model, TOKENIZER, "", **options) == generate(
        model, TOKENIZER, str(TOKENIZER.eod), **options
    )


def test_sample_follows_the_odds() -> None:
    """20,000 draws: each share within 5 standard errors; with top_k=2 the third never comes."""
    generator = torch.Generator().manual_seed(0)
    odds = torch.tensor([0.5, 0.3, 0.2])
    for temperature, top_k, expected in [
        (1.0, 0, odds),
        (0.5, 0, odds.square() / odds.square().sum()),
        (1.0, 2, torch.tensor([0.625, 0.375, 0.0])),
    ]:
        draws = [sample(odds.log(), temperature, top_k, generator) for _ in range(20000)]
        shares = torch.bincount(torch.tensor(draws), minlength=3) / 20000
        error = 5 * (expected * (1 - expected) / 20000).sqrt()
        assert ((shares - expected).abs() <= error).all(), (temperature, top_k, shares)


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "top_k"])
def test_negative_numbers(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} -1"):
        generate(build(GPT2), TOKENIZER, "1", **{name: -1})
    with pytest.raises(InputError, match="temperature nan"):
        generate(build(GPT2), TOKENIZER, "1", temperature=float("nan"))


@ranks(2)
def test_sharded() -> None:
    """All ranks draw what one process draws, and the model still trains afterwards."""
    mesh = init_device_mesh("cpu", (2,))
    expected = generate(build(PEAKED), NoEnd(), "5 6", max_new_tokens=12, seed=9)
    model = build(PEAKED)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    text = generate(model, NoEnd(), "5 6", max_new_tokens=12, seed=9)
    assert text == expected and len(ids(text)) == 12
    texts = [None, None]
    dist.all_gather_object(texts, text)
    assert texts == [text, text]
    tokens = torch.ones(1, 4, dtype=torch.int64)
    model(tokens, labels=tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
