"""How good a model is: perplexity on a text, or tasks of the lm-evaluation-harness.

    megatron-zpp evaluate --load checkpoints/tuned --data-path data/held_out.jsonl
    megatron-zpp evaluate --load checkpoints/tuned --tasks hellaswag,arc_easy --batch_size 8

The model is a folder of checkpoints, a Hugging Face folder or a .gguf file. Started by torchrun or
zeropp, the ranks share its weights and the work. docs/evaluation.md describes files and numbers.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_zpp.commands.run_command import open_model, require_writable, run_command
from megatron_zpp.data.indexed_dataset import datasets_beside
from megatron_zpp.settings.command_line import HELP, split_flags, vocabulary
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.text.perplexity import measure_perplexity
from megatron_zpp.text.text_model import TextModelConfig, open_text_model
from megatron_zpp.tokenizer.base import load_package
from zeropp.atomic import write_atomically
from zeropp.errors import InputError
from zeropp.ranks import Environment, broadcast_object

USAGE = """\
usage: {program} --load MODEL --data-path DATA ... [flags]
       {program} --load MODEL --tasks TASK ... [flags] [flags of lm-eval]"""
DATA_FLAGS = ("--data-path", "--data_path")
MODEL_NAME = "megatron-zpp"  # in lm-eval
MODEL_FLAGS = ("--model", "-M", "--model_args", "-a", "--device")  # of lm-eval; we set them
NOTHING_TO_MEASURE = "give --load, and what to measure: --data-path or --tasks; see --help"
STDOUT = "-"


@dataclass(frozen=True, kw_only=True)
class LengthConfig(Section):
    """How much of a text the model sees"""

    seq_length: int | None = flag(
        None, "maximum context length in tokens (default: the model's)", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(Section):
    """Perplexity; the tokenizer's flags replace the tokenizer that comes with the model"""

    data_path: tuple[str, ...] | None = flag(
        None,
        "dataset prefixes, .txt files, or .jsonl files of examples; each is measured separately",
    )
    stride: int | None = flag(
        None, "tokens from one window to the next (default: --seq-length)", minimum=1
    )
    limit: int | None = flag(None, "use only this many documents of each file", minimum=1)
    batch_size: int = flag(4, "number of passages to compute at once", minimum=1)
    json: str | None = flag(None, "write the results to this file; - prints only them")


TASK_SECTIONS = (TextModelConfig, LengthConfig, TokenizerConfig)
PERPLEXITY_SECTIONS = (TextModelConfig, PerplexityConfig, LengthConfig, TokenizerConfig)


def main(argv: Sequence[str], program: str = "megatron-zpp evaluate") -> int:
    """Run the command; returns the exit status, after a line `error: ...` where it is not 0."""
    usage = USAGE.format(program=program)
    is_perplexity = any(word.partition("=")[0] in DATA_FLAGS for word in argv)
    if is_perplexity or any(word in HELP for word in argv):
        return run_command(argv, usage, PERPLEXITY_SECTIONS, run_perplexity, joins_ranks=True)
    ours, others = split_flags(argv, vocabulary(TASK_SECTIONS), short=True)
    run = partial(run_tasks, arguments=others)
    return run_command(ours, usage, TASK_SECTIONS, run, joins_ranks=True)


def run_tasks(
    environment: Environment,
    config: TextModelConfig,
    length: LengthConfig,
    tokenizer: TokenizerConfig,
    *,
    arguments: Sequence[str],
) -> None:
    """Run lm-eval's own command line on rank 0, with our model as its `--model`.

    Raises InputError; what lm-eval raises ends this rank, and the launcher then ends the others.
    """
    if config.load is None or not arguments:
        raise InputError(NOTHING_TO_MEASURE)
    for word in arguments:
        if word.partition("=")[0] in MODEL_FLAGS:
            raise InputError(
                f"{word}: leave it out; the model is set by --load, --dtype and the tokenizer "
                "flags, and each rank uses its own device"
            )
    load_package("lm_eval", "--tasks")
    if environment.rank:
        open_text_model(config, tokenizer, environment, open_model).follow()
        return
    from lm_eval.__main__ import cli_evaluate  # noqa: PLC0415 - optional
    from lm_eval.api.registry import model_registry  # noqa: PLC0415 - optional

    from megatron_zpp.text.lm_eval_model import opened_by  # noqa: PLC0415 - imports lm_eval

    model_registry.register(MODEL_NAME, target=opened_by(open_model))
    model_arguments = json.dumps(model_arguments_of(config, length, tokenizer))
    model_flags = ["--model", MODEL_NAME, "--model_args", model_arguments]
    own_argv = sys.argv
    sys.argv = ["lm-eval", "run", *arguments, *model_flags]
    try:
        cli_evaluate()
    finally:
        sys.argv = own_argv
    broadcast_object(None)  # the other ranks stop following


def model_arguments_of(
    config: TextModelConfig, length: LengthConfig, tokenizer: TokenizerConfig
) -> dict[str, Any]:
    """The arguments of MegatronZppLM that open this model; those that were not set are left out."""
    arguments = {"pretrained": config.load}  # lm-eval names its files of results after it
    if length.seq_length is not None:
        arguments["max_length"] = length.seq_length
    for section in (config, tokenizer):
        defaults = asdict(type(section)())
        for name, value in asdict(section).items():
            if name != "load" and value != defaults[name]:
                arguments[name] = value
    return arguments


def run_perplexity(
    environment: Environment,
    model_config: TextModelConfig,
    config: PerplexityConfig,
    length: LengthConfig,
    tokenizer: TokenizerConfig,
) -> None:
    """Open the model on all ranks; rank 0 measures each file and reports."""
    if model_config.load is None or not config.data_path:
        raise InputError(NOTHING_TO_MEASURE)
    for path in config.data_path:
        if not Path(path).is_file() and not Path(f"{path}.idx").is_file():
            hint = datasets_beside(path)
            text = f"{path}: no such file, and no dataset {path}.idx"
            raise InputError(f"{text}; {hint}" if hint else text)
    if config.json not in (None, STDOUT):
        require_writable(config.json, "--json")
    model = open_text_model(model_config, tokenizer, environment, open_model)
    if environment.rank:
        model.follow()
        return
    results = {
        "model": model_config.load,
        "parameters": model.model.num_parameters(),
        "dtype": model_config.dtype,
        "seq_length": length.seq_length or model.num_positions,
        "perplexity": [],
    }
    try:
        for path in config.data_path:
            perplexity = measure_perplexity(
                model,
                path,
                seq_length=length.seq_length,
                stride=config.stride,
                limit=config.limit,
                batch_size=config.batch_size,
            )
            results["perplexity"].append({"data": path, **asdict(perplexity)})
    finally:  # the files measured before an unreadable one, or before Ctrl-C, are reported
        model.close()
        if results["perplexity"]:
            report(config, results)


def report(config: PerplexityConfig, results: dict[str, Any]) -> None:
    """Print a table; write the JSON file that the flags name."""
    text = json.dumps(results, indent=2) + "\n"
    if config.json == STDOUT:
        print(text, end="")
        return
    for name, value in table_rows(results):
        print(f"{name:<24}{value}")
    if config.json is not None:
        write_atomically(config.json, lambda file: file.write(text.encode()))


def table_rows(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of the table."""
    yield "model", f"{results['model']}, {results['parameters']:,} parameters, {results['dtype']}"
    for row in results["perplexity"]:
        yield "perplexity", f"{row['perplexity']:.4f} on {row['data']}"
        yield "  loss", f"{row['loss']:.5f} nats per token"
        yield "  of", f"{row['tokens']:,} tokens, {row['documents']:,} documents"
