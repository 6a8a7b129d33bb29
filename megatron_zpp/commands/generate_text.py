"""Text from a model, after prompts of the command line, a file or standard input.

    megatron-zpp generate --load checkpoints --prompt "def main(" --temperature 0.8
    megatron-zpp generate --load checkpoints --input prompts.jsonl --output texts.jsonl

The model is a folder of checkpoints, a Hugging Face folder or a .gguf file. Started by torchrun or
zeropp, the ranks share its weights. Text is printed as it is generated.
"""

import json
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.commands.run_command import open_model, require_writable, run_command
from megatron_zpp.data.instructions.examples import read_objects, text_field
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.settings.data import EXAMPLES_SUFFIX
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.text.generate import Request
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.text.text_model import (
    TextModel,
    TextModelConfig,
    open_text_model,
    termination_signals_ignored,
)
from megatron_zpp.tokenizer.base import read_text, require_unicode
from zeropp.atomic import write_atomically
from zeropp.errors import InputError
from zeropp.ranks import Environment

USAGE = "usage: {program} --load FOLDER [--prompt TEXT] [flags]"
STDIN = "-"
# Control characters, which a terminal would obey, without tabs and new lines.
CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
UNPRINTABLE = dict.fromkeys(CONTROLS, "\N{REPLACEMENT CHARACTER}")
PROMPT = "prompt"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Section):
    """Prompts, and where the text goes"""

    prompt: tuple[str, ...] | None = flag(None, "texts to continue")
    input: str | None = flag(
        None, 'file of prompts: .jsonl with {"prompt": ...}, else one per line; -: standard input'
    )
    output: str | None = flag(None, "write prompts and texts to this .jsonl (default: print them)")
    samples: int = flag(1, "number of texts per prompt", minimum=1)
    batch_size: int = flag(8, "number of texts to generate at the same time", minimum=1)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """How the tokens are drawn, and what ends a text"""

    max_new_tokens: int = flag(256, "maximum number of tokens to generate", minimum=1)
    temperature: float = flag(0.8, "0: always the likeliest token; above 1: more random", minimum=0)
    top_k: int = flag(0, "draw only from this many likeliest tokens (default: from all)", minimum=0)
    top_p: float = flag(
        1.0, "draw from the likeliest tokens whose probabilities sum to this", above=0, maximum=1
    )
    seed: int = flag(0, "seed of the first text; the next text has the next seed", minimum=0)
    stop: tuple[str, ...] | None = flag(None, "strings that end a text; they are not printed")
    stop_token: tuple[int, ...] | None = flag(
        None, "token ids that end a text, besides the end of document", minimum=0
    )

    def request(self, prompt: Sequence[int], number: int) -> Request:
        """Request `number` of this run, counted from 0."""
        return Request(
            prompt=tuple(prompt),
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=self.seed + number,
            ),
            stop_tokens=frozenset(self.stop_token or ()),
            stop_texts=self.stop or (),
        )


SECTIONS = (TextModelConfig, GenerateConfig, SamplingConfig, TokenizerConfig)


def main(argv: Sequence[str], program: str = "megatron-zpp generate") -> int:
    """Run the command; returns the exit status, after a line `error: ...` where it is not 0."""
    return run_command(argv, USAGE.format(program=program), SECTIONS, run, joins_ranks=True)


def run(
    environment: Environment,
    model_config: TextModelConfig,
    config: GenerateConfig,
    sampling: SamplingConfig,
    tokenizer: TokenizerConfig,
) -> None:
    """Open the model on all ranks; rank 0 reads the prompts and prints."""
    if config.prompt is not None and config.input is not None:
        raise InputError("--prompt and --input contradict each other: give one of them")
    if config.prompt is None and config.input is None and sys.stdin.isatty():
        raise InputError("there is no prompt: give --prompt TEXT or --input FILE, or pipe one in")
    prompts = [] if environment.rank else prompts_of(config)
    if config.output is not None and not environment.rank:
        require_writable(config.output, "--output")
    model = open_text_model(model_config, tokenizer, environment, open_model)
    if environment.rank:
        with termination_signals_ignored():
            model.follow()
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        write(model, config, sampling, prompts)
    finally:
        model.close()


def prompts_of(config: GenerateConfig) -> list[str]:
    """The prompts that the flags name; without such flags all of standard input is one prompt.

    Raises InputError for a file that cannot be read, is not text, or has no prompts.
    """
    if config.prompt is not None:
        return [require_unicode(prompt, "--prompt") for prompt in config.prompt]
    if config.input is None:
        return [_read_standard_input()]
    if config.input.endswith(EXAMPLES_SUFFIX):
        prompts = [_prompt_of(fields, where) for where, fields in read_objects(config.input)]
    else:
        is_piped = config.input == STDIN
        text = _read_standard_input() if is_piped else read_text(config.input, "--input")
        prompts = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n") if text]
    if not prompts:
        raise InputError(f"--input {config.input}: there is no prompt in it")
    return prompts


def write(
    model: TextModel, config: GenerateConfig, sampling: SamplingConfig, prompts: Sequence[str]
) -> None:
    """Print or save the texts of all prompts, `batch_size` at a time."""
    repeated = [prompt for prompt in prompts for _ in range(config.samples)]
    requests = []
    for number, prompt in enumerate(repeated):
        requests.append(sampling.request(model.tokenizer.prompt(prompt), number))
        try:
            model.check(requests[-1])
        except InputError as error:
            raise InputError(f"{prompt[:40]!r}: {error}") from None
    pairs, size = list(zip(repeated, requests, strict=True)), config.batch_size
    batches = [pairs[first : first + size] for first in range(0, len(pairs), size)]
    with Interruption() as interruption:
        if config.output is not None:
            _save(model, config.output, batches, interruption)
            return
        for batch in batches:
            show(model, *zip(*batch, strict=True), interruption)
            interruption.raise_if_requested()


class Interruption:
    """A context in which Ctrl-C only sets a flag, so that generation ends on all ranks together."""

    is_requested = False

    def __enter__(self) -> "Interruption":
        self._handler = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._handler)

    def is_cancelled(self, row: int) -> bool:
        """For `TextModel.stream`: whether its texts should end."""
        return self.is_requested

    def raise_if_requested(self) -> None:
        """Raise KeyboardInterrupt after Ctrl-C."""
        if self.is_requested:
            raise KeyboardInterrupt

    def _request(self, number: int, frame: object) -> None:
        self.is_requested = True


def show(
    model: TextModel,
    prompts: Sequence[str],
    requests: Sequence[Request],
    interruption: Interruption,
) -> None:
    """Print each prompt followed by its text, as it is generated, and the speed at the end.

    One text is printed at a time, in order; the others wait their turn. The speed goes to standard
    error.
    """
    unprinted = list(prompts)
    is_finished = [False] * len(prompts)
    counts = [0] * len(prompts)
    current, started = 0, time.perf_counter()
    for piece in model.stream(requests, interruption.is_cancelled):
        unprinted[piece.row] += piece.text
        is_finished[piece.row] = piece.finish_reason is not None
        counts[piece.row] = piece.num_tokens
        while current < len(prompts):
            _print_text(unprinted[current])
            unprinted[current] = ""
            if not is_finished[current]:
                break
            _print_text("\n")
            current += 1
    seconds = time.perf_counter() - started
    print(f"[{sum(counts)} tokens, {sum(counts) / seconds:.1f} tokens/s]", file=sys.stderr)


def _print_text(text: str) -> None:
    """Print text at once, on a terminal without control characters."""
    is_terminal = sys.stdout.isatty()
    print(text.translate(UNPRINTABLE) if is_terminal else text, end="", flush=True)


def _prompt_of(fields: dict[str, Any], where: str) -> str:
    if PROMPT not in fields:
        raise InputError(f'{where}: expected {{"{PROMPT}": "some text"}}')
    return text_field(fields, PROMPT, where)


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 text (byte {error.start})") from None


def _save(
    model: TextModel, output: str, batches: Iterable[Any], interruption: Interruption
) -> None:
    rows = []
    for batch in batches:
        rows += [{PROMPT: prompt, "text": "", "finish": None} for prompt, _ in batch]
        requests = [request for _, request in batch]
        for piece in model.stream(requests, interruption.is_cancelled):
            row = rows[len(rows) - len(batch) + piece.row]
            row["text"] += piece.text
            row["finish"] = piece.finish_reason
        interruption.raise_if_requested()
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(Path(output), lambda file: file.write(text.encode()))
    print(f"{len(rows)} texts in {output}", file=sys.stderr)
