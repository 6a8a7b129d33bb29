"""Adds the metadata of a distribution named deepspeed to the wheel.

transformers and accelerate ask importlib.metadata for that name. A wheel has one .dist-info folder,
which is ours; importlib.metadata also reads an .egg-info folder.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

VERSION = "0.18.1+zeropp"  # that of the DeepSpeed whose interface zeropp.deepspeed follows
METADATA = f"""\
Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: Not DeepSpeed: its interface, provided by zeropp-deepspeed
"""


class BuildWithMetadata(build_py):
    """Copies the package, and writes deepspeed's metadata beside it."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib) / f"deepspeed-{VERSION}.egg-info"
        self.mkpath(str(folder))
        (folder / "PKG-INFO").write_text(METADATA)


setup(cmdclass={"build_py": BuildWithMetadata})
