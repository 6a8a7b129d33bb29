"""Write fine-tuning examples: functions of the standard library and their docstrings.

    python examples/docstrings.py runs/finetune/docstrings.jsonl

Each line is {"prompt": a function without docstring, "answer": the docstring's first paragraph}.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

EXCLUDED = ("site-packages", "dist-packages", "test", "idlelib", "lib2to3")
MAX_CHARACTERS = 600  # of a function's source
QUESTION = "Write the docstring of this Python function.\n\n{source}\n\nDocstring: "


def main() -> None:
    """Write the examples to the file that is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="file to write, in .jsonl")
    target = parser.parse_args().target
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = {example["prompt"]: example for path in sources() for example in examples(path)}
    lines = [json.dumps(example) for example in sorted(unique.values(), key=sort_key)]
    partial = target.with_suffix(".part")
    partial.write_text("".join(f"{line}\n" for line in lines))
    partial.rename(target)
    print(f"{len(lines):,} functions with docstrings in {target}")


def sources() -> list[Path]:
    """The source files of the library's own modules and packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = [root]
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in EXCLUDED:
            folders.append(folder)
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def examples(path: Path) -> Iterator[dict[str, str]]:
    """One example for each documented function of a file."""
    text = path.read_text(errors="replace")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        answer = ast.get_docstring(node).split("\n\n")[0].strip()
        node.body = node.body[1:] or [ast.Pass()]
        source = ast.unparse(node)
        if answer and len(source) <= MAX_CHARACTERS:
            yield {"prompt": QUESTION.format(source=source), "answer": answer}


def sort_key(example: dict[str, str]) -> str:
    """A hash: the same order on every machine, in which the examples of a file are not adjacent."""
    return hashlib.sha256(example["prompt"].encode()).hexdigest()


if __name__ == "__main__":
    main()
