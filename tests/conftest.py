"""What every test shares: the clone on the path, one thread per process, and ranks that end."""

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.disable()  # until all test files are imported: what they allocate stays
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compiling processes
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # trust the CPU instead of compiling
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each program would compile this project anew
sys.dont_write_bytecode = False
ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402  (needs the variables above)

from tests import fork_server  # noqa: E402  (needs the path above)
from tests.ranks import shared_pool  # noqa: E402

if hasattr(os, "SCHED_BATCH"):  # inherited by ranks, who outnumber the cores: else who is woken
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # preempts who holds gloo's locks

PROCESSES = re.compile(
    r"\b(subprocess|tests\.ranks|tests\.launched|launched_nodes|training_runs|benchmarks\.started|"
    r"run_on_ranks|started_ranks|closed|emulated|cuda_compile|torch\.compile)\b"
)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job: tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
if fork_server.AVAILABLE and fork_server.starter.client is None:
    fork_server.starter.install(fork_server.Client())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only files that start no processes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose source mentions what starts processes, where that is asked for."""
    if not config.getoption("quick") or collection_path.suffix != ".py":
        return None
    return PROCESSES.search(collection_path.read_text()) is not None or None


@pytest.fixture(autouse=True)
def no_group_is_left_open() -> Iterator[None]:
    """Fail the test that leaves its process in a default process group, instead of a later one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left the default process group open")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test and its fixtures; a marked one forks no programs."""
    if item.get_closest_marker("new_interpreter") is None:
        return (yield)
    with fork_server.starter.new_interpreters():
        return (yield)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    shared_pool().close()
