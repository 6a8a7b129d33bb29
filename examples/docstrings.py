"""Examples to fine-tune on that every machine has: the standard library's functions and docstrings.

    python examples/docstrings.py runs/finetune/docstrings.jsonl

Each line is {"prompt": a function without its docstring, "answer": the first paragraph of it}.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = ("site-packages", "dist-packages", "test", "idlelib", "lib2to3")
LONGEST = 600  # characters of a function that is shown
QUESTION = "Write the docstring of this Python function.\n\n{source}\n\nDocstring: "


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="file to write, in .jsonl")
    target = parser.parse_args().target
    target.parent.mkdir(parents=True, exist_ok=True)
    found = {one["prompt"]: one for path in sources() for one in examples(path)}
    lines = [json.dumps(one) for one in sorted(found.values(), key=place)]
    aside = target.with_suffix(".part")
    aside.write_text("".join(f"{line}\n" for line in lines))
    aside.rename(target)
    print(f"{len(lines):,} functions with docstrings in {target}")


def sources() -> list[Path]:
    """The library's own modules and packages."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    packages = [one for one in folder.iterdir() if one.is_dir() and one.name not in LEFT_OUT]
    return [path for place in (folder, *packages) for path in sorted(place.glob("*.py"))]


def examples(path: Path) -> Iterator[dict[str, str]]:
    """What the documented functions of a file make."""
    text = path.read_text(errors="replace")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        answer = ast.get_docstring(node).split("\n\n")[0].strip()
        node.body = node.body[1:] or [ast.Pass()]
        source = ast.unparse(node)
        if answer and len(source) <= LONGEST:
            yield {"prompt": QUESTION.format(source=source), "answer": answer}


def place(example: dict[str, str]) -> str:
    """Where an example stands: the same order everywhere, and no file's examples together."""
    return hashlib.sha256(example["prompt"].encode()).hexdigest()


if __name__ == "__main__":
    main()
