"""Flags and what becomes of them, as `tests/data` lists them."""

import csv
import shlex
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[2] / "data"


def rows(name: str, **where: str) -> list[dict[str, str]]:
    """The rows of a table by the names of its columns; "" for what a row leaves out.

    Of all that have the values of `where` in these columns.
    """
    with (DATA / name).open() as file:
        table = list(csv.DictReader(file, delimiter="\t", restval="", quoting=csv.QUOTE_NONE))
    return [row for row in table if all(row[key] == value for key, value in where.items())]


def fork_flags() -> dict[str, list[str]]:
    """What a script gives each flag of a fork of Megatron."""
    lines = (DATA / "fork_flags.txt").read_text().splitlines()
    return {flag: values for flag, *values in map(shlex.split, lines) if flag[:2] == "--"}


@dataclass(frozen=True)
class Script:
    """A launch script: how many ranks it starts, and all of its flags."""

    ranks: int
    flags: str


def launch_scripts() -> dict[str, Script]:
    """Public launch scripts, by name."""
    scripts = {}
    for part in (DATA / "launch_scripts.txt").read_text().split("\n[")[1:]:
        head, _, flags = part.partition("]\n")
        name, ranks = head.split()
        scripts[name] = Script(int(ranks), " ".join(flags.partition("\n\n")[0].split()))
    return scripts
