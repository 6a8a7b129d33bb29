"""Compiled libraries: the hash of their sources, and how they are loaded through ctypes.

The libraries have a plain C interface, so that they build in seconds and work with any torch.
ctypes releases the interpreter's lock during a call. setup.py runs this file by itself, before
torch or the package can be imported.
"""

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

SUFFIX = EXTENSION_SUFFIXES[-1]  # the one without a version of Python, as setup.py names them
INT, ADDRESS = ctypes.c_int64, ctypes.c_void_p
NOT_BUILT = "csrc/ was not built here (no compiler, or not installed with pip or make setup)"


class LibraryError(Exception):
    """A compiled library cannot be used; the message says why."""


def load(
    folder: Path, stem: str, functions: Mapping[str, Sequence[type]], not_built: str = NOT_BUILT
) -> ctypes.CDLL:
    """The library `stem` in `folder`, with the argument types of its functions declared.

    Raises LibraryError if it is not there, saying `not_built`, or was built from other sources.
    """
    path = folder / (stem + SUFFIX)
    if not path.exists():
        raise LibraryError(not_built)
    library, built_from = ctypes.CDLL(str(path)), None
    if hasattr(library, "zpp_source_hash"):
        library.zpp_source_hash.restype = ctypes.c_char_p
        built_from = library.zpp_source_hash().decode()
    if built_from != expected_hash():
        raise LibraryError(f"{path} was built from other sources; install again (make setup)")
    for name, types in functions.items():
        getattr(library, name).argtypes = types
    return library


PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = PACKAGE.parent / "csrc"
RECORD = "native/csrc.sha256"  # in the package; only in installed copies, which have no csrc/
SUFFIXES = (".cpp", ".cu", ".h", ".py")


def source_hash(folder: Path = SOURCES) -> str:
    """A hexadecimal hash of the names and contents of all sources in `folder`, flags included."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def expected_hash() -> str:
    """The hash that libraries must have: recorded when the package was built, or of csrc/ here."""
    record = PACKAGE / RECORD
    return record.read_text().strip() if record.exists() else source_hash()
