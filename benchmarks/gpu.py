"""Run the tests and benchmarks that need a GPU, and write one Markdown file with the results.

    python benchmarks/gpu.py [--minutes 8] [--output FILE.md] [--only STEP ...] [--keep FOLDER]
        [--wheels FOLDER]

Works in a fresh clone where nothing is installed and without a network: it starts the module
benchmarks.shared.gpu_run with the clone on Python's path, and with what is in the wheels of a
folder, for packages that the machine lacks (orjson, backports.zstd, pytest-xdist).
"""

import os
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Replace this process with `python -m benchmarks.shared.gpu_run`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH"), unpacked(sys.argv[1:])])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.shared.gpu_run", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


def unpacked(words: list[str]) -> str | None:
    """The folder with what is in the wheels that the command line names, if it names any."""
    folders = [after for word, after in zip(words, words[1:], strict=False) if word == "--wheels"]
    folders += [word.partition("=")[2] for word in words if word.startswith("--wheels=")]
    wheels = [wheel for folder in folders for wheel in sorted(Path(folder).glob("*.whl"))]
    if folders and not wheels:
        sys.exit(f"error: there are no wheels in {folders[-1]}")
    target = tempfile.mkdtemp(prefix="wheels-") if wheels else None
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(target)
    return target


if __name__ == "__main__":
    main()
