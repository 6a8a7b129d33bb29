"""Examples to fine-tune on, from files with a JSON object a line.

An example is a prompt with its answer, or a text. `FORMS` are the names that its fields may have.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropp.errors import InputError

# Prompt and answer, the first form that fits; a text is its own form.
FORMS = (("prompt", "answer"), ("prompt", "completion"), ("question", "answer"))
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
TEXT = "text"
BLANK_LINE = "\n\n"  # after an instruction and after its input
WANTED = "prompt and answer (or completion), instruction, input and output, or text"
BOM = b"\xef\xbb\xbf"
SHOWN = 60  # characters of a bad line


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A prompt and the answer to learn; without a prompt `answer` is a text, all to be learned."""

    where: str
    prompt: str | None
    answer: str


def read_examples(paths: Sequence[str]) -> Iterator[Example]:
    """Every example of the files, in their order; InputError names the file and the line."""
    for path in paths:
        for where, fields in read_objects(path):
            yield _example(fields, where)


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and line, and the JSON object that stands there; blank lines are left out."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(BOM) if number == 1 else line
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _object(line, where)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected a file of examples") from error


def text_of(fields: dict[str, Any], name: str, where: str) -> str:
    """A field that must be a text; InputError if it is something else."""
    value = fields[name]
    if not isinstance(value, str):
        raise InputError(f"{where}: {name!r} holds {json.dumps(value)[:SHOWN]}, expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: {name!r} has half of a surrogate pair at character {error.start}"
        ) from error
    return value


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:SHOWN].decode(errors="replace").rstrip()
        raise InputError(f"{where}: not JSON ({error}): {shown}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: expected a JSON object, got {json.dumps(fields)[:SHOWN]}")
    return fields


def _example(fields: dict[str, Any], where: str) -> Example:
    pair = next((form for form in FORMS if all(name in fields for name in form)), None)
    if pair:
        prompt, name = text_of(fields, pair[0], where), pair[1]
    elif INSTRUCTION in fields and OUTPUT in fields:
        asked = [text_of(fields, one, where) for one in (INSTRUCTION, INPUT) if fields.get(one)]
        prompt, name = "".join(part + BLANK_LINE for part in asked), OUTPUT
    elif TEXT in fields:
        prompt, name = None, TEXT
    else:
        found = ", ".join(map(repr, fields)) or "none"
        raise InputError(f"{where}: expected {WANTED}; its fields are {found}")
    answer = text_of(fields, name, where)
    if not answer.strip():
        raise InputError(f"{where}: {name!r} is empty: there is nothing to learn from it")
    return Example(where=where, prompt=prompt, answer=answer)
