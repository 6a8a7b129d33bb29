"""Tokens per second of generation: with the key-value cache, without, and by transformers.

The model is a Llama with random weights, or one from a Hugging Face folder; both programs read the
same files. All decode greedily in fp32 from the same prompts of random tokens, without stopping
early, in turn. All must generate the same tokens, or nothing is timed. The time is that of the
whole text, including its prompt.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement, median_of, time_interleaved
from benchmarks.shared.table import Column, table
from benchmarks.shared.timers import WALL_CLOCK, CpuTimer
from megatron_zpp.interchange.open_model import load_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.text.generate import Request, stream
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.tokenizer.base import NullTokenizer
from zeropp.errors import InputError

CACHED, UNCACHED, TRANSFORMERS = "with the cache", "without it", "transformers"
Generator = Callable[[torch.Tensor], list[list[int]]]  # of prompts [rows, tokens]: new tokens


def check(options: Options) -> None:
    """Raise InputError without the peer."""
    if find_spec("transformers") is None:
        raise InputError("transformers is needed: pip install transformers")


def measure(options: Options, result: dict) -> None:
    """Make or open the model, verify, time."""
    result["versions"]["transformers"] = version("transformers")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.load or save_random_llama(Path(temporary), options)
        model, _ = load_model(folder)
        generators = {
            CACHED: our_generator(model, options.tokens, use_cache=True),
            UNCACHED: our_generator(model, options.tokens, use_cache=False),
            TRANSFORMERS: transformers_generator(folder, options.tokens),
        }
    result |= {
        "parameters": model.num_parameters(), "prompt": options.prompt, "tokens": options.tokens,
        "threads": torch.get_num_threads(), "sizes": [],
    }  # fmt: skip
    for rows in options.rows:
        generator = torch.Generator().manual_seed(rows)
        size = (rows, options.prompt)
        prompts = torch.randint(1, model.padded_vocab_size, size, generator=generator)
        result["sizes"].append({"rows": rows, **compare(generators, prompts, options.rounds)})


def save_random_llama(folder: Path, options: Options) -> Path:
    """Save a Llama with random weights and three query heads for each key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = options.hidden // 64
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 3, 1), vocab_size=16384, tie_word_embeddings=True,
        max_position_embeddings=options.prompt + options.tokens, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def our_generator(model: GPT, tokens: int, *, use_cache: bool) -> Generator:
    """Our generation; the null tokenizer's text is the tokens themselves."""
    tokenizer = NullTokenizer(model.padded_vocab_size)
    tokenizer.eod = -1  # nothing ends a text early

    def run(prompts: torch.Tensor) -> list[list[int]]:
        requests = [
            Request(prompt=tuple(prompt), max_new_tokens=tokens, sampling=Sampling(temperature=0))
            for prompt in prompts.tolist()
        ]
        texts = [""] * len(requests)
        for piece in stream(model, tokenizer, requests, use_cache=use_cache):
            texts[piece.row] += piece.text
        return [[int(word) for word in text.split()] for text in texts]

    return run


def transformers_generator(folder: Path | str, tokens: int) -> Generator:
    """`generate` of transformers on the same files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

    def run(prompts: torch.Tensor) -> list[list[int]]:
        mask = torch.ones_like(prompts)
        texts = model.generate(prompts, attention_mask=mask, eos_token_id=None, **settings)
        return texts[:, prompts.shape[1] :].tolist()

    return run


def compare(generators: Mapping[str, Generator], prompts: torch.Tensor, rounds: int) -> dict:
    """Seconds of each generator for all texts; raises Disagreement if their tokens differ."""
    expected = generators[CACHED](prompts)
    for name, generate in generators.items():
        if generate(prompts) != expected:
            raise Disagreement(f"{name}: other tokens than {CACHED}; nothing is timed")
    runs = {name: partial(generate, prompts) for name, generate in generators.items()}
    return {"seconds": time_interleaved(runs, rounds, CpuTimer(WALL_CLOCK).seconds)}


def show(result: dict) -> str:
    """Tokens per second."""

    def rate(name: str) -> Callable[[dict], float]:
        return lambda size: result["tokens"] * size["rows"] / median_of(name)(size["seconds"])

    names = (CACHED, UNCACHED, TRANSFORMERS)
    columns = [Column(f"{name}, tokens/s", rate(name), ".1f") for name in names]
    return (
        f"{result['parameters'] / 1e6:.1f} M parameters, prompts of {result['prompt']} tokens, "
        f"{result['tokens']} generated, {result['threads']} threads; tokens equal\n\n"
        f"{table(result['sizes'], Column('texts at once', 'rows'), *columns)}"
    )


OPTIONS = (
    Flag("--load", help="a Hugging Face folder"),
    Flag("--prompt", 128, "tokens of a prompt"),
    Flag("--tokens", 48, "tokens to generate"),
    Flag("--rows", (1, 4), "texts at once"),
    Flag("--rounds", 3, "timed runs of each"),
    Flag("--layers", 8, "of a model with random weights"),
    Flag("--hidden", 576, "of such a model; heads have 64"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, check=check)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
