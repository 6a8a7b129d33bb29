"""Text from a model: from prompts of the command line or a file, or one after another by hand.

    python tools/generate.py --load checkpoints --prompt "def main(" --temperature 0.8
    python tools/generate.py --load checkpoints --input prompts.jsonl --output texts.jsonl
    python tools/generate.py --load checkpoints

The last one asks for prompts, with a history that the arrow keys bring back. The folder holds
checkpoints of `pretrain_gpt.py`, or a Hugging Face model. Started by torchrun or zeropp the ranks
share the weights. Text is printed as it is drawn.
"""

import json
import logging
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.data.instructions.examples import read_objects, text_of  # noqa: E402
from megatron_zpp.settings.command_line import read, vocabulary  # noqa: E402
from megatron_zpp.settings.config import TokenizerConfig  # noqa: E402
from megatron_zpp.settings.data import EXAMPLES_SUFFIX  # noqa: E402
from megatron_zpp.settings.flag import Section, flag, flags  # noqa: E402
from megatron_zpp.text.generate import Piece, Request  # noqa: E402
from megatron_zpp.text.sampling import Sampling  # noqa: E402
from megatron_zpp.text.text_model import TextModel, TextModelConfig, open_text_model  # noqa: E402
from megatron_zpp.text.text_tool import require_place, run_tool  # noqa: E402
from megatron_zpp.tokenizer.base import read_text  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402
from zeropp.ranks.process_group import leave  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

USAGE = "usage: python tools/generate.py --load FOLDER [--prompt TEXT] [flags]"
STDIN = "-"
HISTORY = ".megatron_zpp_history"  # in the home folder
MOST_HISTORY = 1000
ASK = "> "
# What a terminal would obey: control characters, but for tabs and new lines.
CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
UNPRINTABLE = dict.fromkeys(CONTROLS, "\N{REPLACEMENT CHARACTER}")
PROMPT = "prompt"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Section):
    """What to go on from, and where the text goes"""

    prompt: tuple[str, ...] | None = flag(None, "texts to go on from")
    input: str | None = flag(
        None, 'file of prompts: .jsonl with {"prompt": ...}, else one a line; -: standard input'
    )
    output: str | None = flag(None, "write prompts and texts to this .jsonl (default: print them)")
    samples: int = flag(1, "texts of each prompt", minimum=1)
    batch_size: int = flag(8, "texts drawn at the same time", minimum=1)


@dataclass(frozen=True, kw_only=True)
class DrawConfig(Section):
    """How the text is drawn, and what ends it"""

    max_new_tokens: int = flag(256, "most tokens of a text", minimum=1)
    temperature: float = flag(
        0.8, "0: the likeliest token always; above 1: more surprise", minimum=0
    )
    top_k: int = flag(0, "draw from so many likeliest tokens (default: from all)", minimum=0)
    top_p: float = flag(
        1.0, "draw from the likeliest tokens that have this share", above=0, maximum=1
    )
    seed: int = flag(0, "of the first text; the next one has the next seed", minimum=0)
    stop: tuple[str, ...] | None = flag(None, "texts that end a text and are left out")
    stop_token: tuple[int, ...] | None = flag(
        None, "token ids that do, besides the end of document", minimum=0
    )

    def request(self, prompt: Sequence[int], number: int) -> Request:
        """The `number`-th request of this run."""
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


SECTIONS = (TextModelConfig, GenerateConfig, DrawConfig, TokenizerConfig)


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    return run_tool(argv, USAGE, SECTIONS, run)


def run(
    environment: Environment,
    model_config: TextModelConfig,
    config: GenerateConfig,
    draw: DrawConfig,
    tokenizer: TokenizerConfig,
) -> None:
    """Open the model on all ranks; the first one reads, asks and prints."""
    if config.prompt is not None and config.input is not None:
        raise InputError("--prompt and --input contradict: give one of them")
    interactive = config.prompt is None and config.input is None and sys.stdin.isatty()
    if interactive and config.output is not None:
        raise InputError("--output needs --prompt or --input")
    prompts = [] if interactive or environment.rank else prompts_of(config)
    if config.output is not None and not environment.rank:
        require_place(config.output, "--output")
    model = open_text_model(model_config, tokenizer, environment)
    if environment.rank:
        model.follow()
        return
    try:
        if interactive:
            Conversation(model, draw).hold()
        else:
            write(model, config, draw, prompts)
    finally:
        model.close()


def prompts_of(config: GenerateConfig) -> list[str]:
    """The prompts that the flags name; all of standard input is one, if they name none.

    Raises InputError for what cannot be read, is no text, or has no prompts.
    """
    if config.prompt is not None:
        return [_unicode(prompt, "--prompt") for prompt in config.prompt]
    if config.input is None:
        return [_standard_input()]
    if config.input.endswith(EXAMPLES_SUFFIX):
        prompts = [_prompt(fields, where) for where, fields in read_objects(config.input)]
    else:
        is_piped = config.input == STDIN
        text = _standard_input() if is_piped else read_text(config.input, "--input")
        prompts = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n") if text]
    if not prompts:
        raise InputError(f"--input {config.input}: there is no prompt in it")
    return prompts


def write(
    model: TextModel, config: GenerateConfig, draw: DrawConfig, prompts: Sequence[str]
) -> None:
    """Print or save the texts of all prompts, `batch_size` at a time."""
    every = [prompt for prompt in prompts for _ in range(config.samples)]
    requests = []
    for number, prompt in enumerate(every):
        requests.append(draw.request(model.tokenizer.prompt(prompt), number))
        try:
            model.check(requests[-1])
        except InputError as error:
            raise InputError(f"{prompt[:40]!r}: {error}") from None
    batches = _batches(list(zip(every, requests, strict=True)), config.batch_size)
    with Interruption() as interruption:
        if config.output is not None:
            _save(model, config.output, batches, interruption)
            return
        screen = Screen(sys.stdout)
        for batch in batches:
            screen.show(model, *zip(*batch, strict=True), interruption)
            interruption.happen()


class Interruption:
    """While it is entered, Ctrl-C is noted only: what runs on several ranks must end on all."""

    came = False

    def __enter__(self) -> "Interruption":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def is_cancelled(self, row: int) -> bool:
        """For `TextModel.stream`: whether its texts shall end."""
        return self.came

    def happen(self) -> None:
        """Raise the KeyboardInterrupt that was noted."""
        if self.came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: object) -> None:
        self.came = True


class Screen:
    """Prints texts as they are drawn: the first one at once, the others when it is their turn."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")

    def show(
        self, model: TextModel, prompts: Sequence[str], requests: Sequence[Request],
        interruption: Interruption,
    ) -> None:
        """Print each prompt with its text after it, and the speed at the end."""
        waiting = list(prompts)
        ends: list[str | None] = [None] * len(prompts)
        turn, begun = 0, time.perf_counter()
        counts = [0] * len(prompts)
        for piece in model.stream(requests, interruption.is_cancelled):
            waiting[piece.row] += piece.text
            ends[piece.row], counts[piece.row] = piece.finish, piece.num_tokens
            while turn < len(prompts):
                self._print(waiting[turn])
                waiting[turn] = ""
                if ends[turn] is None:
                    break
                self._print("\n")
                turn += 1
        say_speed(sum(counts), time.perf_counter() - begun)

    def piece(self, piece: Piece) -> None:
        """Print one piece."""
        self._print(piece.text)

    def _print(self, text: str) -> None:
        self._out.write(text.translate(UNPRINTABLE) if self._is_terminal else text)
        self._out.flush()


class Conversation:
    """Asks for a prompt, shows the text after it, and asks again, until the input ends."""

    def __init__(self, model: TextModel, draw: DrawConfig) -> None:
        self._model, self._draw = model, draw
        self._screen = Screen(sys.stdout)
        self._asked = 0

    def hold(self) -> None:
        """Talk until end of file or /quit; Ctrl-C ends a text, or leaves a line."""
        print(f"{self._model.name}: type a prompt; /help lists what else there is")
        with _history():
            while (line := self._line()) is not None:
                self._answer(line)

    def _line(self) -> str | None:
        while True:
            try:
                line = input(ASK)
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return None
            if line.strip() in ("/quit", "/exit"):
                return None
            if line:
                return line

    def _answer(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._write(line.replace("\\n", "\n"))
        except InputError as error:
            print(f"error: {error}")

    def _command(self, line: str) -> None:
        name, _, value = line[1:].strip().partition(" ")
        known = {one.names[0]: one for one in flags(DrawConfig)}
        if name == "help":
            print("a line is a prompt (\\n in it is a new line); Ctrl-C ends a text; and:")
            for one in known.values():
                print(f"  /{one.names[0]} VALUE".ljust(26), getattr(self._draw, one.name))
            print("  /quit")
            return
        if name not in known:
            raise InputError(f"unknown command /{name}; /help lists the known ones")
        words = value.split(" ") if known[name].count else [value]
        typed = read([f"--{name}", *words], vocabulary((DrawConfig,)))
        self._draw = replace(
            self._draw, **{dest: entry.value for dest, entry in typed.items()}
        )

    def _write(self, prompt: str) -> None:
        tokens = self._model.tokenizer.prompt(_unicode(prompt, "the prompt"))
        request = self._draw.request(tokens, self._asked)
        self._model.check(request)
        self._asked += 1
        with Interruption() as interruption:
            begun, count = time.perf_counter(), 0
            for piece in self._model.stream([request], interruption.is_cancelled):
                self._screen.piece(piece)
                count = piece.num_tokens
            print()
            say_speed(count, time.perf_counter() - begun)


def say_speed(num_tokens: int, seconds: float) -> None:
    """One line on standard error."""
    rate = f"{num_tokens / seconds:.1f} tokens/s" if seconds else ""
    print(f"[{num_tokens} tokens, {rate}]", file=sys.stderr)


def _prompt(fields: dict[str, Any], where: str) -> str:
    if PROMPT not in fields:
        raise InputError(f'{where}: expected {{"{PROMPT}": "some text"}}')
    return text_of(fields, PROMPT, where)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 text (byte {error.start})") from None


def _unicode(text: str, place: str) -> str:
    """The text; what a command line or a terminal brought may be no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: {text[:40]!r} is not UTF-8 text") from None
    return text


def _save(
    model: TextModel, output: str, batches: Iterable[Any], interruption: Interruption
) -> None:
    rows = []
    for batch in batches:
        rows += [{PROMPT: prompt, "text": "", "finish": None} for prompt, _ in batch]
        asked = [request for _, request in batch]
        for piece in model.stream(asked, interruption.is_cancelled):
            row = rows[len(rows) - len(batch) + piece.row]
            row["text"] += piece.text
            row["finish"] = piece.finish
        interruption.happen()
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(Path(output), lambda file: file.write(text.encode()))
    print(f"{len(rows)} texts in {output}", file=sys.stderr)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


@contextmanager
def _history() -> Iterator[None]:
    """Let the arrow keys bring back earlier lines, also those of earlier times.

    The module is imported here: it changes how `input` works, and Windows has none.
    """
    try:
        import readline
    except ImportError:
        yield
        return
    path = Path.home() / HISTORY
    readline.set_history_length(MOST_HISTORY)
    try:
        if path.exists():
            readline.read_history_file(path)
    except OSError as error:
        logging.warning("earlier lines cannot be read: %s: %s", path, error.strerror)
    yield
    try:
        readline.write_history_file(path)
    except OSError as error:
        logging.warning("these lines cannot be kept: %s: %s", path, error.strerror)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
