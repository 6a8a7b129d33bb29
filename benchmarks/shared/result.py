"""A benchmark's result: begun with its surroundings, ended as a table and as JSON."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.shared.surroundings import surroundings
from zeropp.atomic import write_atomically


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag that `finish` takes the value of."""
    parser.add_argument("--json", metavar="FILE", help="write the result here; - prints only it")


def begin(name: str) -> dict:
    """The result of benchmarks/`name`.py so far: its command line, the commit and the machine."""
    command = shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    return {"benchmark": name, "command": command, **surroundings()}


def finish(result: dict, show: Callable[[dict], None], target: str | None) -> None:
    """Let `show` print the table, and write the JSON to `target`; for "-", print the JSON only."""
    result["load"]["after"] = os.getloadavg()[0]
    text = json.dumps(result, indent=1) + "\n"
    if target == "-":
        print(text, end="")
        return
    show(result)
    if target is not None:
        write_atomically(Path(target), lambda file: file.write(text.encode()))


def heading(result: dict, *libraries: str) -> str:
    """Two lines: date and commit; the machine, versions of the `libraries`, load."""
    machine, load = result["machine"], result["load"]
    changed = " + changes" if result["uncommitted"] else ""
    versions = [f"{name} {result['versions'][name]}" for name in libraries]
    facts = [f"{machine['processor']}, {machine['cores']} cores, "
             f"{' '.join(machine['gpus']) or 'no GPU'}", *versions]
    return (
        f"{result['date']}  commit {result['commit'] or 'unknown'}{changed}\n"
        f"{'; '.join(facts)}; load {load['before']:.1f} to {load['after']:.1f}"
    )
