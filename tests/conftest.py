"""What every test shares: the clone on the path, one thread per process, and ranks that end."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.ranks import shared_pool  # noqa: E402  (needs the path above)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionfinish() -> None:
    shared_pool().close()
