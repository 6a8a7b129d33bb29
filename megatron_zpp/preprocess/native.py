"""The compiled reader of csrc/json_lines.cpp, where it was built; elsewhere json does it all."""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
STEM = "_json"
VERSION = 1  # csrc/json_lines.cpp has the same: raised with each change of what passes
LINES = 4096  # read at once
SLACK = 8  # bytes that are written beyond the last text

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class JsonReader:
    """The function of the library."""

    library: ctypes.CDLL

    def lines(
        self, data: bytes, keys: Sequence[str]
    ) -> Iterator[tuple[bytes, tuple[list[str], ...] | None]]:
        """Each line of UTF-8 `data` as (b"", its text for each key), or (the line, None).

        The latter where the line is not plain: whatever json says of it holds.
        """
        names = b"".join(key.encode(errors="surrogatepass") + b"\0" for key in keys)
        content, out = np.frombuffer(data, np.uint8), np.empty(len(data) + SLACK, np.uint8)
        lines = np.empty((LINES, 2), np.int64)
        places = np.empty((LINES, len(keys), 2), np.int64)
        text, done = memoryview(out), 0
        while done < len(data):
            count = self.library.zpp_json_lines(
                content.ctypes.data + done, len(data) - done, names, len(keys), LINES,
                out.ctypes.data, lines.ctypes.data, places.ctypes.data,
            )  # fmt: skip
            bounds = (lines[:count] + done).tolist()
            for (start, end), found in zip(bounds, places[:count].tolist(), strict=True):
                if found[0][0] < 0:
                    yield data[start:end], None
                else:
                    yield b"", tuple([str(text[begin:stop], "utf-8")] for begin, stop in found)
            done = bounds[-1][1] + 1


@cache
def native() -> JsonReader | None:
    """The compiled reader, or None where there is none that fits; says so once, at INFO."""
    built = [FOLDER / (STEM + suffix) for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in built if path.exists()), None)
    if found is None:
        why = "csrc/ was not built here (no compiler, or not installed with pip or make setup)"
    elif (reader := _load(found)) is None:
        why = f"{found} was built from other sources; install again (make setup)"
    else:
        return reader
    log.info("JSON is read by Python, which takes longer: %s", why)
    return None


def _load(path: Path) -> JsonReader | None:
    library = ctypes.CDLL(str(path))
    number, address = ctypes.c_int64, ctypes.c_void_p
    arguments = {
        "zpp_json_version": (),
        "zpp_json_lines": (address, number, ctypes.c_char_p, number, number)
        + (address, address, address),
    }
    if not all(hasattr(library, name) for name in arguments):
        return None
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, number
    return JsonReader(library=library) if library.zpp_json_version() == VERSION else None
