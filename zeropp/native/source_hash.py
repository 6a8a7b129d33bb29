"""The hash of the sources in csrc/, by which a compiled library is known to be current.

setup.py runs this file by itself, before torch or the package can be imported.
"""

import hashlib
from pathlib import Path

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
