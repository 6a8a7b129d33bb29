"""--manual-gc collects garbage where it is asked for; --deterministic-mode, and what it refuses."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_zpp.settings.config import TrainingConfig
from megatron_zpp.train.determinism import deterministic_kernels
from megatron_zpp.train.garbage_collection import GarbageCollection
from tests.megatron_zpp.train.training_runs import log_of, losses
from tests.ranks import ranks

RUN = "--micro-batch-size 2 --train-iters 6 --eval-iters 1 --eval-interval 3 --mock-data "


@contextmanager
def collections() -> Iterator[list[int]]:
    """The generation of each collection in the block; 2 is a full one."""
    generations: list[int] = []

    def note(phase: str, facts: dict) -> None:
        if phase == "start":
            generations.append(facts["generation"])

    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)


def leave_garbage() -> None:
    """Make more cycles than the automatic collection waits for."""
    for _ in range(2 * gc.get_threshold()[0]):
        cycle: list = []
        cycle.append(cycle)


def test_nothing_is_collected_in_between():
    config = TrainingConfig(manual_gc=True, manual_gc_interval=2)
    with GarbageCollection(config) as garbage, collections() as generations:
        leave_garbage()
        garbage.after_iteration(1)
        assert generations == []
        garbage.after_iteration(2)
        assert generations == [2]
        with garbage.around_evaluation():
            assert generations == [2, 2]
        assert generations == [2, 2, 0]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TrainingConfig(manual_gc=True), [2, 0]),
        (TrainingConfig(manual_gc=True, manual_gc_interval=1, no_manual_gc_eval=True), [2]),
    ],
)
def test_the_interval_and_the_evaluation_are_apart(config, expected):
    with GarbageCollection(config) as garbage, collections() as generations:
        garbage.after_iteration(1)
        with garbage.around_evaluation():
            pass
    assert generations == expected


def test_without_the_flag_python_decides():
    with GarbageCollection(TrainingConfig()) as garbage, collections() as generations:
        garbage.after_iteration(1)
        leave_garbage()
        assert generations and gc.isenabled()


@ranks(1, timeout=120)
def test_a_run_collects_when_it_is_told_to() -> None:
    with collections() as generations:
        log_of(RUN + "--manual-gc --manual-gc-interval 2")
    # At the start, after iterations 2, 4 and 6, and before the evaluations after 3 and 6.
    while_training = generations[generations.index(2) :]
    assert while_training.count(2) >= 6
    with collections() as automatic:
        log_of(RUN)
    assert automatic.count(2) < while_training.count(2)


def put_twice() -> torch.Tensor:
    """Write to an element twice, in an order that PyTorch does not promise."""
    return torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))


def test_an_operation_without_a_deterministic_kernel_is_an_error(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    put_twice()
    with deterministic_kernels():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="deterministic"):
            put_twice()
    put_twice()


@ranks(1, timeout=120)
def test_a_run_has_deterministic_kernels_for_all_that_it_does() -> None:
    usual = log_of(RUN)
    with deterministic_kernels():
        deterministic = log_of(RUN)
    assert losses(usual) == losses(deterministic)
