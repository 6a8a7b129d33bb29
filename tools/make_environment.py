"""Makes `.venv` and installs this clone in it, editable, on top of an existing torch if possible.

    python tools/make_environment.py [--torch VERSION [--exact]]
    python tools/make_environment.py --next     # only says what to type next

If the Python that runs this can import a supported torch, that torch is used and never replaced;
otherwise VERSION is installed. Packages that can be imported already are not downloaded, so that a
machine that has all of them needs no network. Uses the standard library only.
"""

from __future__ import annotations  # so that an older Python gets as far as the error message

import argparse
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

OLDEST_PYTHON = (3, 10)
TORCH_VERSIONS = ((2, 11), (2, 15))  # from, and below; as in pyproject.toml
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
VENV_PYTHON = FOLDER / "bin" / "python"
# Prints the version of torch as pip names it: for PyPI's 2.11.0 torch.__version__ is 2.11.0+cu130.
TORCH_VERSION = "import torch; from importlib.metadata import version; print(version('torch'))"
# Fails if setuptools is missing or needs a wheel package to build this one.
CAN_BUILD = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"
WHAT = f"""setup: makes {FOLDER} and installs this project in it, with what it needs.
setup: A torch that this Python has is used; else {{torch}} is downloaded, in a few minutes.
setup: Nothing outside of that folder is changed; `make clean` removes it."""
NEXT = """setup: .venv is ready. In this folder, type next

  source .venv/bin/activate    # once in each shell: `python`, `zeropp`, ... are then those of .venv
  make pretrain                # trains a small GPT on 4 ranks, a few minutes on 2 cores
  zeropp --help                # starts ranks, on this machine or on several

README.md goes on with your own data, your own trainer, and programs written for DeepSpeed."""


def main() -> None:
    """Make or complete `.venv`; steps that are already done are skipped."""
    options = _options()
    if options.next:
        print(NEXT)
        return
    print(WHAT.format(torch=f"torch {options.torch}"), flush=True)
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"error: this is Python {sys.version.split()[0]}; 3.10 or newer is needed: "
            "make setup PYTHON=python3.12"
        )
    if not VENV_PYTHON.exists():
        print("setup: making .venv", flush=True)
        has_pip = find_spec("ensurepip") is not None
        venv.EnvBuilder(with_pip=has_pip).create(FOLDER)
        if not has_pip:  # Debian's Python has no ensurepip, but may have a pip of its own
            _borrow_packages()
    exact_version = options.torch if options.exact else None
    if not _is_supported(_output_in_venv(TORCH_VERSION), exact_version):
        if _is_supported(_output(sys.executable, TORCH_VERSION), exact_version):
            _borrow_packages()
        else:
            print(f"setup: installing torch {options.torch}", flush=True)
            _pip("install", f"torch=={options.torch}")
    print(f"setup: using torch {_output_in_venv(TORCH_VERSION)}", flush=True)
    _install()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make .venv for this clone.")
    parser.add_argument(
        "--torch", default="2.13.0", help="the version to install if no supported one is there"
    )
    parser.add_argument("--exact", action="store_true", help="accept no other version")
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


def _borrow_packages() -> None:
    """Let `.venv` import the packages of this Python, after those installed in `.venv` itself.

    This is done by a .pth file and not by system-site-packages, which would not work for a Python
    that is itself in a virtual environment.
    """
    folders = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    site_packages = _output_in_venv("import sysconfig; print(sysconfig.get_paths()['purelib'])")
    print(f"setup: using the packages of {sys.executable}", flush=True)
    Path(site_packages, "borrowed_packages.pth").write_text("\n".join(folders) + "\n")
    if _output_in_venv(CAN_BUILD) is None and _output(sys.executable, CAN_BUILD) is not None:
        _pip("uninstall", "--yes", "setuptools")  # it is old, and hides the borrowed one


def _install() -> None:
    """Install this clone, editable, and what it needs; torch keeps its version."""
    if _output_in_venv(CAN_BUILD) is None:
        _pip("install", "setuptools>=77,<82")  # torch 2.11 allows no newer one
    constraints = FOLDER / "constraints.txt"
    constraints.write_text(f"torch=={_output_in_venv(TORCH_VERSION)}\n")
    clone = f"{ROOT}[test]"
    print("setup: installing this project and what else it needs", flush=True)
    _pip("install", "--no-build-isolation", "--constraint", str(constraints), "--editable", clone)


def _pip(*arguments: str) -> None:
    command = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    if subprocess.run(command).returncode:
        sys.exit("error: pip could not install what is needed (see above); run make setup again")


def _output_in_venv(code: str) -> str | None:
    return _output(str(VENV_PYTHON), code)


def _output(python: str, code: str) -> str | None:
    """What a Python interpreter prints for some code; `None` if the code fails."""
    process = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=FOLDER)
    return process.stdout.strip() if process.returncode == 0 else None


if __name__ == "__main__":
    main()
