"""Loading a compiled library through ctypes, if there is one that was built from these sources.

The libraries have a plain C interface, so that they build in seconds and work with any torch.
ctypes releases the interpreter's lock during a call.
"""

import ctypes
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from zeropp.native.source_hash import expected_hash

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
