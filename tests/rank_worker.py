"""The other side of `ranks.py`: a process that waits for test functions and runs them as one rank.

A test file is imported once per process, by its path, with pytest's rewriting of `assert`, so that
a failing rank shows the values. Between two tests everything that a test could leave behind in the
process is put back: environment, folder, random state, process groups, DTensor's caches.
"""

import ast
import faulthandler
import gc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType

import pytest
import torch
from _pytest.assertion import rewrite

from tests.rank_group import Membership
from tests.ranks import Idle, Job, Outcome


def serve(descriptor: int) -> None:
    """Run the jobs that come through a pipe until the parent closes it or dies."""
    connection = Connection(descriptor)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # torch's own notes a stack for each absent device (0.9 ms)
        torch.manual_seed = torch.default_generator.manual_seed
    faulthandler.enable()  # a rank that crashes says where
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    _exempt_from_collection()
    membership = Membership()
    connection.send("ready")
    while True:
        try:
            rank, folder, world, job = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        with _output_to(Path(folder) / f"output.{rank}"), _restored():
            connection.send(
                _outcome(job, partial(membership.join, world, rank, job.ranks_per_node))
            )
            progress = membership.end_test()
            _clean()
        connection.send(Idle(progress))


def _outcome(job: Job, join: Callable[[], None]) -> Outcome:
    kind, text = "passed", ""
    try:
        function = _function(job)  # before there are groups: what it exempts from collection stays
        _seed()
        join()
        function(**pickle.loads(job.arguments))
    except pytest.skip.Exception as skip:
        kind, text = "skipped", str(skip)
    except pytest.xfail.Exception as xfail:
        kind, text = "xfailed", str(xfail)
    except BaseException as error:  # whatever it is, the parent raises it again
        inside = error.__traceback__.tb_next or error.__traceback__
        kind, text = "failed", "".join(traceback.format_exception(type(error), error, inside))
    return Outcome(kind, text, time.monotonic())


def _function(job: Job) -> Callable:
    module = sys.modules.get(job.module)
    if module is None or getattr(module, "__file__", None) != job.path:
        module = _import(job.module, job.path)
        _exempt_from_collection()
    return getattr(module, job.name).__wrapped__


def _exempt_from_collection() -> None:
    """What lives on after a test stays: the next collection need not look at it (0.2 s)."""
    gc.collect()
    gc.freeze()


def _import(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, loader=_Rewriting(name, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Rewriting(importlib.machinery.SourceFileLoader):
    """Import a test file with pytest's `assert`."""

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        code = rewrite._read_pyc(
            path, rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        )
        return code or self._rewritten()  # pytest keeps the code of test files only

    def _rewritten(self) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite.rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _clean() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    gc.collect()


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    saved = os.dup(1), os.dup(2)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        for standard, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(saved[standard - 1], standard)
            os.close(saved[standard - 1])


@contextmanager
def _restored() -> Iterator[None]:
    environment, folder = dict(os.environ), os.getcwd()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
