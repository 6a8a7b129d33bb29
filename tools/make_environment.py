"""Make `.venv`: this clone installed in it, with a torch that is there already where there is one.

    python tools/make_environment.py [--torch VERSION [--exact]]

A suitable torch (2.11 or newer) that the Python running this can import is used and never replaced;
otherwise VERSION is installed. What is importable already is not downloaded, so that a machine
without a network needs none if it has everything. Needs the standard library only.
"""

from __future__ import annotations  # an older Python must come as far as its error

import argparse
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
INSIDE = FOLDER / "bin" / "python"
# torch's version as pip knows it (PyPI's 2.11.0 calls itself 2.11.0+cu130 inside), and whether
# setuptools can build this package without a wheel package.
FOUND_TORCH = "import torch; from importlib.metadata import version; print(version('torch'))"
CAN_BUILD = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"


def main() -> None:
    """Make or complete `.venv`; every step that is already done is skipped."""
    options = _options()
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"error: this is Python {sys.version.split()[0]}; 3.10 or newer is needed: "
            "make setup PYTHON=python3.12"
        )
    if not INSIDE.exists():
        print("setup: making .venv", flush=True)
        has_pip = find_spec("ensurepip") is not None
        venv.EnvBuilder(with_pip=has_pip).create(FOLDER)
        if not has_pip:  # Debian's Python: it may still have a pip of its own to lend
            _lend_packages()
    wanted = options.torch if options.exact else None
    if not _suits(_inside(FOUND_TORCH), wanted):
        if _suits(_output(sys.executable, FOUND_TORCH), wanted):
            _lend_packages()
        else:
            print(f"setup: installing torch {options.torch}", flush=True)
            _pip("install", f"torch=={options.torch}")
    print(f"setup: using torch {_inside(FOUND_TORCH)}", flush=True)
    _install()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make .venv for this clone.")
    parser.add_argument("--torch", default="2.13.0", help="the version to install if none suits")
    parser.add_argument("--exact", action="store_true", help="only that version suits")
    return parser.parse_args()


def _suits(found: str | None, wanted: str | None) -> bool:
    """Whether a torch version may be used: `wanted` itself, or any that is new enough."""
    if not found:
        return False
    if wanted:
        return found == wanted or found.split("+")[0] == wanted
    return tuple(int(part) for part in found.split(".")[:2]) >= OLDEST_TORCH


def _lend_packages() -> None:
    """Let `.venv` see what this Python sees, behind what is installed in `.venv` itself.

    A .pth file, not system-site-packages: it works for a Python that is itself in an environment.
    """
    seen = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    inside = _inside("import sysconfig; print(sysconfig.get_paths()['purelib'])")
    print(f"setup: using the packages of {sys.executable}", flush=True)
    Path(inside, "lent_packages.pth").write_text("\n".join(seen) + "\n")
    if _inside(CAN_BUILD) is None and _output(sys.executable, CAN_BUILD) is not None:
        _pip("uninstall", "--yes", "setuptools")  # an old one hides the one that is lent


def _install() -> None:
    """Install what is missing and this clone, editable, with torch held at its version."""
    if _inside(CAN_BUILD) is None:
        _pip("install", "setuptools>=77,<82")  # torch 2.11 allows no newer one
    hold = FOLDER / "constraints.txt"
    hold.write_text(f"torch=={_inside(FOUND_TORCH)}\n")
    clone = f"{ROOT}[test]"
    print("setup: installing what else is needed", flush=True)
    _pip("install", "--no-build-isolation", "--constraint", str(hold), "--editable", clone)


def _pip(*arguments: str) -> None:
    command = [str(INSIDE), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    if subprocess.run(command).returncode:
        sys.exit("error: pip could not install what is needed (see above); run make setup again")


def _inside(code: str) -> str | None:
    return _output(str(INSIDE), code)


def _output(python: str, code: str) -> str | None:
    """What a Python prints for some code; `None` if the code fails there."""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=FOLDER)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
