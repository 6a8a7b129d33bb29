"""The command line, the JSON and the heading that all benchmarks have in common."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.shared.environment_report import environment_report
from zeropp.atomic import write_atomically


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flag --json whose help shows `description`, a module's docstring."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here; - prints only it")
    return parser


def parse_with_device(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line with a flag --device; `device` is "cpu" or "cuda" afterwards.

    Hides the GPUs where it is the CPU, exits where a GPU is missing.
    """
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; give --device cpu")
    return options


def begin(module: str) -> dict:
    """Start a benchmark's result with its command line and the environment it runs in.

    `module` is the benchmark's `__spec__.name`, the name that `python -m` takes.
    """
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    name = module.rpartition(".")[2]
    return {"benchmark": name, "command": command, **environment_report()}


def finish(result: dict, show: Callable[[dict], None], target: str | None) -> None:
    """Print the table with `show` and write the JSON to `target`; for "-", print only the JSON."""
    result["load"]["after"] = os.getloadavg()[0]
    if target == "-":
        print(json.dumps(result, indent=1))
        return
    show(result)
    save(result, target)


def save(result: dict, target: str | None) -> None:
    """Write the JSON to a file; do nothing where `target` is None or "-"."""
    if target not in (None, "-"):
        write_text(target, json.dumps(result, indent=1) + "\n")


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    write_atomically(path, lambda file: file.write(text.encode()))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that are text already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def heading(result: dict, *libraries: str) -> str:
    """Two lines: date and commit; machine, versions of the `libraries`, and load."""
    machine, load = result["machine"], result["load"]
    changes = " + changes" if result["uncommitted"] else ""
    versions = [f"{name} {result['versions'][name]}" for name in libraries]
    gpus = " ".join(machine["gpus"]) or "no GPU"
    parts = [f"{machine['processor']}, {machine['cores']} cores, {gpus}", *versions]
    return (
        f"{result['date']}  commit {result['commit'] or 'unknown'}{changes}\n"
        f"{'; '.join(parts)}; load {load['before']:.1f} to {load['after']:.1f}"
    )
