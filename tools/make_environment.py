"""Makes `.venv` and installs this clone in it, editable, on top of an existing torch if possible.

    python tools/make_environment.py [--torch VERSION [--exact]] [--extra NAME]
    python tools/make_environment.py --next     # only says what to type next

If the Python that runs this has a supported torch, that torch is used and never replaced; otherwise
pip installs VERSION. All other packages are installed by uv, which pip brings and which is told
pip's index, or by pip if uv cannot be had; packages that are there already are not downloaded, so
that a machine that has all of them needs no network. The compiled libraries are built meanwhile.
Uses the standard library only.
"""

from __future__ import annotations  # so that an older Python gets as far as the error message

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

OLDEST_PYTHON = (3, 10)
TORCH_VERSIONS = ((2, 11), (2, 15))  # from, and below; as in pyproject.toml
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
VENV_PYTHON = FOLDER / "bin" / "python"
# Prints the version of torch as pip names it: for PyPI's 2.11.0 torch.__version__ is 2.11.0+cu130.
TORCH_VERSION = "from importlib.metadata import version; print(version('torch'))"
# Fails if setuptools is missing or needs a wheel package to build this one.
CAN_BUILD = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"
PIP_IN_VENV = [str(VENV_PYTHON), "-m", "pip"]
FIRST_PIP_FOR_OTHERS = 23  # pip --python
LOG = FOLDER / "compile.log"
BORROWED = "borrowed"  # in .venv: it imports another Python's packages
UV_VARIABLES = {  # by what pip's configuration calls them
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
WHAT = f"""setup: makes {FOLDER} and installs there this project and what {{purpose}}.
setup: A torch that this Python has is used; else {{torch}} is downloaded, the longest part.
setup: Nothing outside of that folder is changed; `make clean` removes it."""
PURPOSES = {None: "training needs", "test": "its tests need", "gguf": "reading .gguf models needs"}
NEXT = """setup: .venv is ready. In this folder, type next

  source .venv/bin/activate    # once in each shell: `python`, `zeropp`, ... are then those of .venv
  make pretrain                # trains a small GPT on 4 ranks, a few minutes on 2 cores
  zeropp --help                # starts ranks, on this machine or on several

README.md goes on with your own data, your own trainer, and programs written for DeepSpeed."""


class Installer:
    """pip or uv, which installs in `.venv`; with `variables` it is uv, which reads projects."""

    def __init__(
        self,
        command: list,
        variables: dict[str, str] | None = None,
        options: list[str] | None = None,
    ) -> None:
        self._command, self._variables, self._options = command, variables or {}, options or []
        self.reads_projects = variables is not None

    def install(self, *arguments: str) -> None:
        """Install packages, or end this program."""
        if not self.runs("install", *arguments):
            sys.exit("error: what is needed cannot be installed (see above); run the command again")

    def remove(self, package: str) -> None:
        """Remove a package."""
        self.runs("uninstall", "--yes", package)

    def runs(self, *arguments: str, quietly: bool = False) -> bool:
        """Run one of its commands; return whether that succeeded."""
        return not subprocess.run(
            [*self._command, *arguments, "--quiet", *self._options],
            cwd=ROOT,
            env={**os.environ, **self._variables},
            stderr=subprocess.DEVNULL if quietly else None,
        ).returncode


def main() -> None:
    """Make or complete `.venv`; steps that are already done are skipped."""
    options = _options()
    if options.next:
        print(NEXT)
        return
    began = time.monotonic()
    purpose = PURPOSES.get(options.extra, f"its extra {options.extra} needs")
    print(WHAT.format(torch=f"torch {options.torch}", purpose=purpose), flush=True)
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"error: this is Python {sys.version.split()[0]}; 3.10 or newer is needed: "
            "make setup PYTHON=python3.12"
        )
    FOLDER.mkdir(exist_ok=True)
    own_pip = _pip_command()
    if not VENV_PYTHON.exists():
        print("setup: making .venv", flush=True)
        venv.EnvBuilder(with_pip=not own_pip).create(FOLDER)
    pip = Installer([*(own_pip or PIP_IN_VENV), "--disable-pip-version-check"])
    exact_version = options.torch if options.exact else None
    version = _output_in_venv(TORCH_VERSION)
    borrows = not _is_supported(version, exact_version) and _is_supported(
        _output(sys.executable, TORCH_VERSION), exact_version
    )
    if borrows:
        _borrow_packages(pip)
    # uv does not see what is borrowed
    installer = pip if borrows or (FOLDER / BORROWED).exists() else _uv(pip) or pip
    if _output_in_venv(CAN_BUILD) is None:
        installer.install("setuptools>=77,<82")  # torch 2.11 allows no newer one
    compiling = None if shutil.which("nvcc") else _compile()
    if not borrows and not _is_supported(version, exact_version):
        print(f"setup: installing torch {options.torch}", flush=True)
        pip.install("--no-compile", f"torch=={options.torch}")  # most modules are never used
    version = _output_in_venv(TORCH_VERSION)
    print(f"setup: using torch {version}", flush=True)
    compiling = compiling or _compile()  # for GPUs, as that torch has them
    extras = ["plots", *([options.extra] if options.extra else [])]  # a run ends with a report
    _install(installer, extras, f"torch=={version}", compiling)
    print(f"setup: took {time.monotonic() - began:.0f} s", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make .venv for this clone.")
    parser.add_argument(
        "--torch", default="2.13.0", help="the version to install if no supported one is there"
    )
    parser.add_argument("--exact", action="store_true", help="accept no other version")
    parser.add_argument("--extra", help="one of the project's optional dependencies, as test")
    parser.add_argument("--next", action="store_true", help="only say what to type next")
    return parser.parse_args()


def _is_supported(version: str | None, exact_version: str | None) -> bool:
    """Whether a torch version may be used: `exact_version` if given, else any supported one."""
    if not version:
        return False
    if exact_version:
        return version == exact_version or version.split("+")[0] == exact_version
    oldest, too_new = TORCH_VERSIONS
    return oldest <= tuple(int(part) for part in version.split(".")[:2]) < too_new


def _borrow_packages(pip: Installer) -> None:
    """Let `.venv` import the packages of this Python, after those installed in `.venv` itself.

    This is done by a .pth file and not by system-site-packages, which would not work for a Python
    that is itself in a virtual environment.
    """
    folders = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    print(f"setup: using the packages of {sys.executable}", flush=True)
    site_packages = _output_in_venv("import sysconfig; print(sysconfig.get_paths()['purelib'])")
    Path(site_packages, "borrowed_packages.pth").write_text("\n".join(folders) + "\n")
    (FOLDER / BORROWED).touch()
    if _output_in_venv(CAN_BUILD) is None and _output(sys.executable, CAN_BUILD) is not None:
        pip.remove("setuptools")  # it is old, and hides the borrowed one


def _uv(pip: Installer) -> Installer | None:
    """Return uv, which is there or which pip can install; None otherwise."""
    path = shutil.which("uv")
    if path is None and pip.runs("install", "uv", quietly=True):
        path = str(FOLDER / "bin" / "uv")
    if path is None:
        print("setup: uv cannot be had, so that pip installs, which takes longer", flush=True)
        return None
    uv = Installer([path, "pip"], _settings_of_pip(), ["--python", str(VENV_PYTHON)])
    if _output_in_venv("import pip") is None:
        uv.install("pip")  # for those who go on with it
    return uv


def _settings_of_pip() -> dict[str, str]:
    """Return uv's variables that say what pip's configuration says, where they are not set."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # of all indices, as pip
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        key, value = name.rpartition(".")[2], value.strip("'\"")
        if key in UV_VARIABLES:
            separator = "," if key == "find-links" else " "
            settings[UV_VARIABLES[key]] = separator.join(value.split())
    return {name: value for name, value in settings.items() if name not in os.environ}


def _install(
    installer: Installer, extras: list[str], torch: str, compiling: subprocess.Popen
) -> None:
    """Install this clone, editable, and what it needs; torch keeps its version."""
    constraints = FOLDER / "constraints.txt"
    constraints.write_text(f"{torch}\n")
    options = ["--constraint", str(constraints)]
    print("setup: installing packages, and compiling", flush=True)
    if installer.reads_projects:
        named = [word for extra in extras for word in ("--extra", extra)]
        installer.install(*options, "-r", "pyproject.toml", *named)
    os.environ["ZPP_BUILD"] = "0"  # they are being built
    clone = f"{ROOT}[{','.join(extras)}]"
    installer.install("--no-build-isolation", *options, "--editable", clone)
    if compiling.wait():
        print(f"setup: the compiler failed, and all works without its libraries, but slower: {LOG}")


def _compile() -> subprocess.Popen:
    """Build the libraries of csrc/ in place, those that are not there already."""
    command = [VENV_PYTHON, "setup.py", "--quiet", "build_ext", "--inplace"]
    with open(LOG, "wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def _output_in_venv(code: str) -> str | None:
    return _output(str(VENV_PYTHON), code)


def _output(python: str, code: str) -> str | None:
    """What a Python interpreter prints for some code; `None` if the code fails."""
    process = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=FOLDER)
    return process.stdout.strip() if process.returncode == 0 else None


def _pip_command() -> list[str]:
    """Return the command of this Python's pip for another one; empty if it has none."""
    command = [sys.executable, "-m", "pip", "--python", str(VENV_PYTHON)]
    version = _output(sys.executable, "import pip; print(pip.__version__)") or "0"
    return command if int(version.split(".")[0]) >= FIRST_PIP_FOR_OTHERS else []


if __name__ == "__main__":
    main()
