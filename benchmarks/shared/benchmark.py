"""The frame of every benchmark: command line, result, printed text and files.

A benchmark is a question (the docstring of its module), flags, a function that measures, and one
that says in Markdown what was measured. It starts with what a reader needs to judge its numbers,
verifies before it times, and ends with status 1 where it may not be trusted.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.shared.charts import require_matplotlib
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.rank_processes import RankFailed
from benchmarks.shared.result import begin, heading, page, save, write_text
from zeropp.errors import InputError

SHAPE = {
    "layers": (4, "transformer blocks"),
    "hidden": (256, "width of the residual stream"),
    "heads": (4, "attention heads"),
    "seq": (128, "tokens of a sample"),
    "vocab": (8192, "size of the vocabulary"),
    "micro-batch": (1, "samples of one forward pass on one rank"),
    "micro-batches": (2, "forward passes of one step"),
}
FAILED, USAGE_ERROR = 1, 2
Options = argparse.Namespace  # the values of flags, by name


@dataclass(frozen=True)
class Flag:
    """A flag of a benchmark, or an argument if its name has no dashes.

    The type is that of `default`: a bool is a switch, a tuple takes several values. `type` is given
    where there is no default; `least` is the smallest number that is accepted; a flag
    that `is_repeated` takes a value each time.
    """

    name: str
    default: object = None
    help: str | None = None
    type: Callable[[str], object] = str
    choices: tuple | None = None
    least: float | None = None
    required: bool = False
    is_repeated: bool = False

    @property
    def field(self) -> str:
        """The name of its value among the options."""
        return self.name.lstrip("-").replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag to a parser."""
        if self.default is False:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        has_default = bool(values) and values[0] is not None
        told = [self.help] if self.help else []
        if has_default and self.default != "":
            told.append(f"(default: {' '.join(map(str, values))})")
        settings = {"type": type(values[0]) if has_default else self.type, "choices": self.choices}
        if isinstance(self.default, tuple):
            settings["nargs"] = "+" if self.name.startswith("-") else "*"
        if self.required:
            settings["required"] = True
        if self.is_repeated:
            settings["action"] = "append"
        parser.add_argument(self.name, default=self.default, help=" ".join(told), **settings)

    def check(self, options: Options) -> None:
        """Raise InputError for a number that is too small."""
        value = getattr(options, self.field)
        if self.least is not None and value is not None and value < self.least:
            raise InputError(f"{self.name} {value}: expected at least {self.least:g}")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, as a module that `python -m` starts.

    spec, question: of the module, `__spec__` and `__doc__`. measure: adds what it measures to the
    result, under the given options. show: the result as text.
    check: completes the options, or raises InputError before anything runs. shape: changes of the
    default `SHAPE`, which becomes flags and `options.shape`; None: it has no shape. has_device: it
    has the flag --device. draw: writes a chart as PNG. succeeded: whether the status is 0.
    """

    spec: ModuleSpec
    question: str
    measure: Callable[[Options, dict], None]
    show: Callable[[dict], str]
    flags: tuple[Flag, ...] = ()
    _: KW_ONLY
    check: Callable[[Options], None] | None = None
    shape: Mapping[str, int] | None = None
    has_device: bool = False
    draw: Callable[[dict, Path], None] | None = None
    succeeded: Callable[[dict], bool] | None = None

    def main(self) -> int:
        """Run as a program; returns the exit status."""
        options = self.parse()
        try:
            self.checked(options)
            result = begin(self.spec.name)
            if self.shape is not None:
                result["shape"] = options.shape
            self.measure(options, result)
        except InputError as mistake:
            return _refuse(mistake, USAGE_ERROR)
        except (Disagreement, RankFailed) as failure:
            return _refuse(failure, FAILED)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        self._finish(options, result)
        return 0 if self.succeeded is None or self.succeeded(result) else FAILED

    def parse(self) -> Options:
        """The command line."""
        parser = argparse.ArgumentParser(
            description=self.question, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = parser.add_argument
        for flag in self._all_flags():
            flag.add_to(parser)
        add("--json", metavar="FILE", help="write the result here; - prints only it")
        add("--results", metavar="FILE.md", help="write a dated page with what is printed")
        if self.draw is not None:
            add("--plot", type=Path, metavar="FILE.png", help="draw a chart (needs matplotlib)")
        if self.has_device:
            add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
        options = parser.parse_args()
        if self.has_device:
            _choose_device(parser, options)
        if self.shape is not None:
            options.shape = {name: getattr(options, name.replace("-", "_")) for name in SHAPE}
        return options

    def checked(self, options: Options) -> None:
        """Complete the options; raises InputError for what is impossible."""
        for flag in self._all_flags():
            flag.check(options)
        if self.draw is not None and options.plot is not None:
            require_matplotlib(options.plot)
        for file in (options.json, options.results, getattr(options, "plot", None)):
            if file not in (None, "-"):
                _require_folder(Path(file).parent)
        if self.check is not None:
            self.check(options)

    def _all_flags(self) -> tuple[Flag, ...]:
        if self.shape is None:
            return self.flags
        return self.flags + tuple(
            Flag(f"--{name}", self.shape.get(name.replace("-", "_"), default), meaning, least=1)
            for name, (default, meaning) in SHAPE.items()
        )

    def _finish(self, options: Options, result: dict) -> None:
        """Print the text and write the files asked for; with --json -, print only the JSON."""
        result["load"]["after"] = os.getloadavg()[0]
        text = self.show(result)
        print(
            json.dumps(result, indent=1) if options.json == "-" else f"{heading(result)}\n\n{text}"
        )
        save(result, options.json)
        if options.results:
            write_text(options.results, page(result, text))
        if self.draw is not None and options.plot is not None:
            self.draw(result, options.plot)


def shape_text(result: Mapping) -> str:
    """The shape of a result in words."""
    return ", ".join(f"{name} {value}" for name, value in result["shape"].items())


def _require_folder(folder: Path) -> None:
    """Create the folder of a result now, since what is measured would be lost without it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write a result into {folder}: {error.strerror}") from error


def _refuse(problem: Exception, status: int) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return status


def _choose_device(parser: argparse.ArgumentParser, options: Options) -> None:
    """Make `device` "cpu" or "cuda"; hide the GPUs where it is the CPU, exit where one lacks."""
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; give --device cpu")
