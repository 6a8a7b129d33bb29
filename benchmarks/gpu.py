"""Run the tests and benchmarks that need a GPU, and write one Markdown file with the results.

    python benchmarks/gpu.py [--minutes 10] [--output FILE.md] [--only STEP ...] [--keep FOLDER]

Works in a fresh clone where nothing is installed: it starts the module benchmarks.shared.gpu_run
with the clone on Python's path.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Replace this process with `python -m benchmarks.shared.gpu_run`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.shared.gpu_run", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
