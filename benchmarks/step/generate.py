"""Tokens per second of generation: with the key-value cache, without, and by transformers.

    python benchmarks/step/generate.py [--load FOLDER] [--prompt N] [--tokens N] [--rows N ...]
        [--rounds N] [--json FILE]

The model is a Llama of random weights, or that of a Hugging Face folder; transformers and we read
the same files. All draw the likeliest token in fp32, from the same prompts of random tokens, and do
not stop early. They take turns, in an order that turns round. The tokens of all must be equal, or
nothing is timed. The time is that of the whole text, its prompt included.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from megatron_zpp.model.gpt import GPT  # noqa: E402
from megatron_zpp.models.open_model import load_model  # noqa: E402
from megatron_zpp.text.generate import Request, stream  # noqa: E402
from megatron_zpp.text.sampling import Sampling  # noqa: E402
from megatron_zpp.tokenizer.null import NullTokenizer  # noqa: E402

CACHED, UNCACHED, PEER = "with the cache", "without it", "transformers"
Contestant = Callable[[torch.Tensor], list[list[int]]]


def main() -> int:
    """Make or open the model, verify, take turns, print a table."""
    options = read_options()
    if find_spec("transformers") is None:
        print("error: transformers is needed: pip install transformers", file=sys.stderr)
        return 1
    result = begin("generate")
    result["versions"]["transformers"] = version("transformers")
    with tempfile.TemporaryDirectory() as made:
        folder = options.load or make(Path(made), options)
        model, _ = load_model(folder)
        contestants = {
            CACHED: ours(model, options.tokens, use_cache=True),
            UNCACHED: ours(model, options.tokens, use_cache=False),
            PEER: theirs(folder, options.tokens),
        }
    result |= {
        "parameters": model.num_parameters(), "prompt": options.prompt, "tokens": options.tokens,
        "threads": torch.get_num_threads(), "sizes": [],
    }  # fmt: skip
    for rows in options.rows:
        generator = torch.Generator().manual_seed(rows)
        size = (rows, options.prompt)
        prompts = torch.randint(1, model.padded_vocab_size, size, generator=generator)
        result["sizes"].append({"rows": rows, **in_turn(contestants, prompts, options.rounds)})
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to draw (default: 48)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="texts at once")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each (default: 3)")
    parser.add_argument("--layers", type=int, default=8, help="of a model of random weights")
    parser.add_argument("--hidden", type=int, default=576, help="of such a model; heads have 64")
    add_json(parser)
    return parser.parse_args()


def make(folder: Path, options: argparse.Namespace) -> Path:
    """The files of a Llama with three query heads for each key."""
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


def ours(model: GPT, tokens: int, *, use_cache: bool) -> Contestant:
    """Our generation; the null tokenizer's text is the tokens themselves."""
    tokenizer = NullTokenizer(model.padded_vocab_size)
    tokenizer.eod = -1  # nothing ends a text early

    def run(prompts: torch.Tensor) -> list[list[int]]:
        requests = [
            Request(
                prompt=tuple(prompt), max_new_tokens=tokens, sampling=Sampling(temperature=0)
            )
            for prompt in prompts.tolist()
        ]
        texts = [""] * len(requests)
        for piece in stream(model, tokenizer, requests, use_cache=use_cache):
            texts[piece.row] += piece.text
        return [[int(word) for word in text.split()] for text in texts]

    return run


def theirs(folder: Path | str, tokens: int) -> Contestant:
    """`generate` of transformers on the same files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

    def run(prompts: torch.Tensor) -> list[list[int]]:
        mask = torch.ones_like(prompts)
        whole = model.generate(prompts, attention_mask=mask, eos_token_id=None, **settings)
        return whole[:, prompts.shape[1] :].tolist()

    return run


def in_turn(contestants: dict[str, Contestant], prompts: torch.Tensor, rounds: int) -> dict:
    """Seconds of each contestant for all texts; raises SystemExit if their tokens differ."""
    texts = {name: contestant(prompts) for name, contestant in contestants.items()}
    for name, tokens in texts.items():
        if tokens != texts[CACHED]:
            raise SystemExit(f"error: {name}: other tokens than {CACHED}; nothing is timed")
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            begun = time.perf_counter()
            contestants[name](prompts)
            seconds[name].append(time.perf_counter() - begun)
    return {"seconds": seconds}


def show(result: dict) -> None:
    """A table of tokens per second."""
    print(heading(result, "torch", "transformers"))
    print(
        f"{result['parameters'] / 1e6:.1f} M parameters, prompts of {result['prompt']} tokens, "
        f"{result['tokens']} drawn, {result['threads']} threads; tokens equal"
    )
    print(f"{'texts at once':>14}" + "".join(f"{name:>18}" for name in (CACHED, UNCACHED, PEER)))
    for size in result["sizes"]:
        medians = {name: statistics.median(times) for name, times in size["seconds"].items()}
        drawn = result["tokens"] * size["rows"]
        rates = "".join(f"{drawn / medians[name]:>16.1f}/s" for name in medians)
        print(f"{size['rows']:>14}{rates}")


if __name__ == "__main__":
    sys.exit(main())
