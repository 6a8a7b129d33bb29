"""How good a model is: perplexity on a text, last words, multiple choice.

    python tools/evaluate.py --load checkpoints/tuned --data-path data/held_out.jsonl
    python tools/evaluate.py --load models/llama --last-word passages.txt --choices questions.jsonl

The model is a folder of checkpoints, a Hugging Face folder or a .gguf file; it is computed whole on
one GPU, or on the CPU where there is none. docs/evaluation.md describes files and numbers.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.checkpoint.safetensors_files import DTYPES  # noqa: E402
from megatron_zpp.models.open_model import load_model  # noqa: E402
from megatron_zpp.settings.config import TokenizerConfig  # noqa: E402
from megatron_zpp.settings.flag import Section, flag  # noqa: E402
from megatron_zpp.text.last_word import measure_last_words  # noqa: E402
from megatron_zpp.text.multiple_choice import measure_choices  # noqa: E402
from megatron_zpp.text.perplexity import measure_perplexity  # noqa: E402
from megatron_zpp.text.scoring import Scorer  # noqa: E402
from megatron_zpp.text.text_tool import require_place, run_tool  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402
from zeropp.ranks.process_group import pick_device  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

USAGE = """\
usage: python tools/evaluate.py --load MODEL [--data-path DATA ...] [--last-word FILE ...]
           [--choices FILE.jsonl ...] [flags]"""
STDOUT = "-"
MEASURES = ("perplexity", "last_word", "multiple_choice")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """What to measure, and on what; the tokenizer's flags replace the one that the model brings"""

    load: str | None = flag(
        None, "folder of checkpoints, Hugging Face folder (config.json in it), or .gguf file"
    )
    data_path: tuple[str, ...] | None = flag(
        None, "perplexity: a dataset's prefix, a .txt, or a .jsonl of examples; each by itself",
    )  # fmt: skip
    last_word: tuple[str, ...] | None = flag(
        None, 'last-word accuracy: .jsonl with {"text": ...}, else a passage a line'
    )
    choices: tuple[str, ...] | None = flag(
        None, 'multiple choice: .jsonl with {"question": ..., "choices": [...], "answer": 0}',
    )  # fmt: skip
    seq_length: int | None = flag(
        None, "most tokens at once (default: the positions of the model)", minimum=1
    )
    stride: int | None = flag(
        None, "perplexity: tokens from one window to the next (default: --seq-length)",
        minimum=1,
    )  # fmt: skip
    limit: int | None = flag(
        None, "only the first so many documents, passages or questions of each file",
        minimum=1,
    )  # fmt: skip
    batch_size: int = flag(4, "passages computed at once", minimum=1)
    dtype: str = flag("fp32", "type of the weights and of the arithmetic", choices=tuple(DTYPES))
    json: str | None = flag(None, "write the results to this file; - prints only them")


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    return run_tool(argv, USAGE, (EvaluateConfig, TokenizerConfig), run)


def run(environment: Environment, config: EvaluateConfig, tokenizer: TokenizerConfig) -> None:
    """Measure and report, on one rank."""
    if environment.world_size > 1:
        raise InputError(f"evaluation takes one rank, not {environment.world_size}: start it alone")
    chosen = None if tokenizer == TokenizerConfig() else tokenizer
    results: dict[str, Any] = {}
    try:
        evaluate(config, chosen, pick_device(environment), results)
    finally:  # what was measured before a file that is no good, or before Ctrl-C, took its time
        if any(name in results for name in MEASURES):
            report(config, results)


def evaluate(
    config: EvaluateConfig,
    tokenizer: TokenizerConfig | None,
    device: torch.device,
    results: dict[str, Any],
) -> None:
    """Enter what is asked for: facts of the model, and a list of results for each measure."""
    asked = (config.data_path, config.last_word, config.choices)
    if config.load is None or not any(asked):
        raise InputError(f"give --load, and what to measure\n{USAGE}")
    for path in (path for paths in asked for path in paths or ()):
        if not Path(path).is_file() and not Path(f"{path}.idx").is_file():
            raise InputError(f"{path}: no such file, and no dataset {path}.idx")
    if config.json not in (None, STDOUT):
        require_place(config.json, "--json")
    model, own = load_model(config.load, device, DTYPES[config.dtype], tokenizer)
    positions = model.config.num_positions
    longest = config.seq_length or positions
    if longest > positions:
        raise InputError(f"--seq-length {longest}: the model has {positions} positions")
    scorer = Scorer(model=model, tokenizer=own, longest=longest, batch_size=config.batch_size)
    results |= {
        "model": config.load,
        "parameters": model.num_parameters(),
        "dtype": config.dtype,
        "seq_length": longest,
    }
    for path in config.data_path or ():
        found = measure_perplexity(scorer, path, config.stride, config.limit)
        results.setdefault("perplexity", []).append({"data": path, **asdict(found)})
    for path in config.last_word or ():
        found = measure_last_words(scorer, path, config.limit)
        results.setdefault("last_word", []).append({"data": path, **asdict(found)})
    for path in config.choices or ():
        found = measure_choices(scorer, path, config.limit)
        results.setdefault("multiple_choice", []).append({"data": path, **asdict(found)})


def report(config: EvaluateConfig, results: dict[str, Any]) -> None:
    """Print the table, and write the JSON where it is wanted."""
    text = json.dumps(results, indent=2) + "\n"
    if config.json == STDOUT:
        print(text, end="")
        return
    for name, value in rows(results):
        print(f"{name:<24}{value}")
    if config.json is not None:
        write_atomically(config.json, lambda file: file.write(text.encode()))


def rows(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines of the table."""
    yield "model", f"{results['model']}, {results['parameters']:,} parameters, {results['dtype']}"
    for found in results.get("perplexity", ()):
        yield "perplexity", f"{found['perplexity']:.4f} on {found['data']}"
        yield "  loss", f"{found['loss']:.5f} nats per token"
        yield "  of", f"{found['tokens']:,} tokens, {found['documents']:,} documents"
    for found in results.get("last_word", ()):
        shares = _share(found["accuracy"], found["standard_error"])
        yield "last-word accuracy", f"{shares} on {found['data']}"
        yield "  perplexity", f"{found['perplexity']:.4f} of a word"
        yield "  of", f"{found['passages']:,} passages{_cut(found)}"
    for found in results.get("multiple_choice", ()):
        shares = _share(found["accuracy"], found["standard_error"])
        yield "multiple choice", f"{shares} by sum, on {found['data']}"
        shares = _share(found["normalized_accuracy"], found["normalized_standard_error"])
        yield "  by sum / length", f"{shares}; by chance {found['chance']:.2%}"
        yield "  of", f"{found['questions']:,} questions{_cut(found)}"


def _share(share: float, error: float) -> str:
    return f"{share:.2%} ± {error:.2%}"


def _cut(found: dict[str, Any]) -> str:
    return f"; {found['cut']:,} times the beginning of a context was cut" if found["cut"] else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
