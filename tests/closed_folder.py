"""A folder that may be read and not written, for root's programs too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GIVEN_UP = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")


class ClosedFolder:
    """`folder` can be filled until `run` starts the first program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def run(self, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a script of the project without the right to write into the folder."""
        self.folder.chmod(0o555)
        writable = os.access(self.folder, os.W_OK)
        if writable and not shutil.which(GIVEN_UP[0]):
            pytest.skip("this user may write everywhere, and there is no setpriv")
        return subprocess.run(
            [*(GIVEN_UP if writable else ()), sys.executable, ROOT / script, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def open(self) -> None:
        """Let it be removed."""
        self.folder.chmod(0o755)
