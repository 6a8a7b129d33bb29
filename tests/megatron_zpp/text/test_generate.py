"""Generation: with and without the cache, batches of independent texts, and what ends a text."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.text.generate import Piece, Request, complete, generate, stream
from megatron_zpp.text.sampling import Sampling, sample
from megatron_zpp.tokenizer.base import NullTokenizer
from tests.megatron_zpp.model.small import GPT2, LLAMA, VOCABULARY, build
from tests.ranks import ranks
from zeropp.errors import InputError

TOKENIZER = NullTokenizer(VOCABULARY)
PEAKED = replace(GPT2, init_method_std=0.3)
LLAMA_PEAKED = replace(LLAMA, init_method_std=0.3)


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
    for config in (PEAKED, LLAMA_PEAKED):
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
    assert generate(going_on, TOKENIZER, "1 2", max_new_tokens=5) == " 7 7 7 7 7"


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


def test_samples_follow_the_probabilities() -> None:
    """5,000 draws: each share within 5 standard errors; with top_k=2 the third never comes."""
    generator = torch.Generator().manual_seed(0)
    odds = torch.tensor([0.5, 0.3, 0.2])
    for settings, expected in [
        ({}, odds),
        ({"temperature": 0.5}, odds.square() / odds.square().sum()),
        ({"top_k": 2}, torch.tensor([0.625, 0.375, 0.0])),
        ({"top_p": 0.75}, torch.tensor([0.625, 0.375, 0.0])),
        ({"top_p": 0.45}, torch.tensor([1.0, 0.0, 0.0])),
        ({"top_p": 0.95}, odds),
        ({"temperature": 1e-30}, torch.tensor([1.0, 0.0, 0.0])),
        # Of the two likeliest the first has 0.625 by itself: top_p counts what top_k leaves.
        ({"top_k": 2, "top_p": 0.6}, torch.tensor([1.0, 0.0, 0.0])),
    ]:
        sampling = Sampling(**settings)
        draws = [sample(odds.log(), sampling, generator) for _ in range(5000)]
        shares = torch.bincount(torch.tensor(draws), minlength=3) / 5000
        error = 5 * (expected * (1 - expected) / 5000).sqrt()
        assert ((shares - expected).abs() <= error).all(), (settings, shares)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [PEAKED, LLAMA_PEAKED], ids=["gpt2", "llama"])
def test_with_and_without_cache_token_for_token(shape: ModelConfig, temperature: float) -> None:
    """In fp32, prompts of different lengths, up to and beyond the 16 positions."""
    model = build(shape)
    requests = [
        request(prompt, temperature, max_new_tokens=count)
        for prompt, count in [("1", 15), ("2 3 4 5 6 7 8", 9), ("9 10 11", 20), ("12", 3)]
    ]
    cached, uncached = (
        [(piece.row, piece.text, piece.finish_reason) for piece in stream(
            model, NoEnd(), requests, use_cache=use_cache)]
        for use_cache in (True, False)
    )  # fmt: skip
    assert cached == uncached
    assert len({row for row, _, _ in cached}) == 4 and len(cached) == 15 + 9 + 20 + 3


def test_a_text_does_not_depend_on_its_neighbours() -> None:
    """Each alone, all together, and in another order; settings and lengths differ."""
    model = build(PEAKED)
    requests = [
        request("1 2", 1.0, seed=1),
        request("1 2", 1.0, seed=2),
        request("3 4 5 6 7", 0.0, max_new_tokens=3),
        request("8", 1.5, seed=3, top_k=5, max_new_tokens=14),
        request("9 9 9", 0.7, seed=4, top_p=0.8, max_new_tokens=7),
    ]
    alone = [complete(model, NoEnd(), [single])[0] for single in requests]
    assert complete(model, NoEnd(), requests) == alone
    assert complete(model, NoEnd(), requests[::-1]) == alone[::-1]
    assert len(set(alone)) == 5 and [len(ids(text)) for text in alone] == [6, 6, 3, 14, 7]


def test_only_the_context_is_recomputed_beyond_the_positions() -> None:
    """Tokens in each forward pass: the prompt, one by one up to 16 positions, then 16 at once."""
    model, shapes = build(PEAKED), []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    complete(model, NoEnd(), [request("1 2 3", 0.0, max_new_tokens=17)])
    assert shapes == [(1, 3), *[(1, 1)] * 13, *[(1, 16)] * 3]


def test_texts_end_by_tokens_texts_and_length_and_leave_the_batch() -> None:
    model, shapes = favour(build(GPT2), 7), []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(len(inputs[0])))
    requests = [
        request("1", 0.0, stop_tokens=frozenset({7})),
        request("1", 0.0, stop_texts=("7 7 7", "nothing"), max_new_tokens=9),
        request("1", 0.0, stop_texts=("7 8",), max_new_tokens=5),
        request("1", 0.0, max_new_tokens=0),
    ]
    pieces = list(stream(model, TOKENIZER, requests))
    assert texts_of(pieces, 4) == ["", " ", " 7 7 7 7 7", ""]
    last = {piece.row: (piece.num_tokens, piece.finish_reason) for piece in pieces}
    assert last == {0: (1, "stop"), 1: (3, "stop"), 2: (5, "length"), 3: (0, "length")}
    assert shapes == [3, 2, 2, 1, 1]


def test_pieces_come_as_they_are_drawn_and_one_text_can_be_cancelled() -> None:
    model, forward_passes = favour(build(GPT2), 7), []
    model.register_forward_pre_hook(lambda module, inputs: forward_passes.append(1))
    gone: set[int] = set()
    pieces = stream(
        model, TOKENIZER, [request("1", 0.0), request("2", 0.0)], is_cancelled=gone.__contains__
    )
    first = [next(pieces) for _ in range(2)]
    assert [(piece.row, piece.text, piece.finish_reason) for piece in first] == [
        (0, " 7", None), (1, " 7", None),
    ]  # fmt: skip
    assert len(forward_passes) == 1 and not model.training
    gone.add(0)
    rest = list(pieces)
    assert (rest[0].row, rest[0].finish_reason) == (0, "cancelled")
    assert {piece.row for piece in rest[1:]} == {1} and rest[-1].finish_reason == "length"
    assert model.training


def test_leaving_early_gives_the_model_its_mode_back() -> None:
    model = build(GPT2)
    pieces = stream(model, TOKENIZER, [request("1", 0.0)])
    next(pieces)
    pieces.close()
    assert model.training


def request(prompt: str, temperature: float, **settings: object) -> Request:
    """A request for 6 tokens; `settings` are fields of Request and of Sampling."""
    sampling = {name: settings.pop(name) for name in ("seed", "top_k", "top_p") if name in settings}
    return Request(
        prompt=tuple(ids(prompt)),
        sampling=Sampling(temperature=temperature, **sampling),
        **{"max_new_tokens": 6, **settings},
    )


def texts_of(pieces: list[Piece], count: int) -> list[str]:
    return ["".join(piece.text for piece in pieces if piece.row == row) for row in range(count)]


def test_a_prompt_as_long_as_the_positions_is_allowed() -> None:
    assert len(ids(complete(build(PEAKED), NoEnd(), [request("1 " * 16, 0.0)])[0])) == 6


def test_logits_that_are_not_finite() -> None:
    model = build(GPT2)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(InputError, match="logits are not finite"):
        generate(model, TOKENIZER, "1")


@ranks(2)
def test_only_the_first_rank_draws_and_is_asked() -> None:
    """A rank whose arithmetic differs, or that would go on, follows the first."""
    model = build(PEAKED)
    expected = complete(model, NoEnd(), [request("5 6", 1.0)])[0]
    if dist.get_rank() == 1:
        model = build(PEAKED, seed=77)
    asked_rows: list[int] = []

    def is_cancelled(row: int) -> bool:
        asked_rows.append(row)
        return len(asked_rows) == 4

    pieces = list(stream(model, NoEnd(), [request("5 6", 1.0)], is_cancelled=is_cancelled))
    text = "".join(piece.text for piece in pieces)
    assert expected.startswith(text) and len(ids(text)) == 3
    assert pieces[-1].finish_reason == "cancelled"
    assert len(asked_rows) == (4 if dist.get_rank() == 0 else 0)
