"""Read fine-tuning examples from files with one JSON object per line.

An example is a prompt with its answer, or a text. `FIELD_PAIRS` are possible names of the fields.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropp.errors import InputError

# Prompt and answer; the first pair that an object has is used.
FIELD_PAIRS = (("prompt", "answer"), ("prompt", "completion"), ("question", "answer"))
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
TEXT = "text"
BLANK_LINE = "\n\n"  # after an instruction and after its input
EXPECTED = "prompt and answer (or completion), instruction, input and output, or text"
BOM = b"\xef\xbb\xbf"
MAX_SHOWN = 60  # characters of an invalid line that an error message shows


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A prompt with its answer; if the prompt is None, `answer` is a text.

    `location` is the file and the line, for error messages.
    """

    location: str
    prompt: str | None
    answer: str


def read_examples(paths: Sequence[str]) -> Iterator[Example]:
    """Yield all examples in the order of the files; InputError names the file and the line."""
    for path in paths:
        for location, fields in read_objects(path):
            yield _parse_example(fields, location)


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location (file and line) of each JSON object, and the object.

    Blank lines are skipped. Raises InputError for a line that is not an object.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(BOM) if number == 1 else line
                if line.strip():
                    location = f"{path}, line {number}"
                    yield location, _parse_object(line, location)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected a file of examples") from error


def text_field(fields: dict[str, Any], name: str, location: str) -> str:
    """Return a field that must be a string; raise InputError if it is something else."""
    value = fields[name]
    if not isinstance(value, str):
        raise InputError(
            f"{location}: {name!r} holds {json.dumps(value)[:MAX_SHOWN]}, expected a string"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{location}: {name!r} has half of a surrogate pair at character {error.start}"
        ) from error
    return value


def _parse_object(line: bytes, location: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        excerpt = line[:MAX_SHOWN].decode(errors="replace").rstrip()
        raise InputError(f"{location}: not JSON ({error}): {excerpt}") from error
    if not isinstance(fields, dict):
        raise InputError(
            f"{location}: expected a JSON object, got {json.dumps(fields)[:MAX_SHOWN]}"
        )
    return fields


def _parse_example(fields: dict[str, Any], location: str) -> Example:
    pairs = [pair for pair in FIELD_PAIRS if all(name in fields for name in pair)]
    if pairs:
        prompt_name, answer_name = pairs[0]
        prompt = text_field(fields, prompt_name, location)
    elif INSTRUCTION in fields and OUTPUT in fields:
        answer_name = OUTPUT
        prompt = ""
        for name in (INSTRUCTION, INPUT):
            if fields.get(name):
                prompt += text_field(fields, name, location) + BLANK_LINE
    elif TEXT in fields:
        prompt, answer_name = None, TEXT
    else:
        names = ", ".join(map(repr, fields)) or "none"
        raise InputError(f"{location}: expected {EXPECTED}; its fields are {names}")
    answer = text_field(fields, answer_name, location)
    if not answer.strip():
        raise InputError(f"{location}: {answer_name!r} is empty: there is nothing to learn from it")
    return Example(location=location, prompt=prompt, answer=answer)
