"""One iteration: what makes the host wait, when numbers are read; garbage; exact kernels."""

import dataclasses
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.settings.config import TrainingConfig
from megatron_zpp.train.inputs import TRAIN
from megatron_zpp.train.loop import GarbageCollection
from megatron_zpp.train.pretrain import deterministic_kernels
from megatron_zpp.train.run import Run
from tests.megatron_zpp.train.training_runs import built_run, log_of, log_of_asynchronous, losses
from tests.ranks import ranks
from zeropp import InputError
from zeropp.optim import FusedAdam

ROOT = Path(__file__).resolve().parents[3]
ALL_THREE = f"--deepspeed_config {ROOT}/examples/ds_zeropp_two_nodes.json"
EXPERTS = (
    "--num-experts 8 --swiglu --disable-bias-linear --moe-aux-loss-coeff 0.1 "
    "--moe-z-loss-coeff 0.1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--expert-model-parallel-size 1 --zero-stage 3 "
)
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
READING_OPS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}


class NoWaiting:
    """Fails where a value of a tensor is read, in Python or in PyTorch: a GPU's host would wait.

    `counts` are tensors that lie on the host with a GPU, too.
    """

    def __init__(self, counts: list[torch.Tensor]) -> None:
        places = {count.data_ptr() for count in counts}

        def check(name: str, reads: set[str], args: tuple) -> None:
            if name in reads and args[0].data_ptr() not in places:
                raise AssertionError(f"{name} of a tensor: the host waits for the device")

        class Calls(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                check(getattr(function, "__name__", ""), READS, args)
                return function(*args, **(kwargs or {}))

        class Ops(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                check(function.overloadpacket.__name__, READING_OPS, args)
                return function(*args, **(kwargs or {}))

        self.modes = [Calls(), Ops()]

    def __enter__(self) -> None:
        for mode in self.modes:
            mode.__enter__()

    def __exit__(self, *exception: object) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*exception)


def read_nothing(flags: str, optimizer: Callable[[Run], torch.optim.Optimizer]) -> None:
    with built_run(f"--train-iters 3 --log-interval 100 --clip-grad 0.1 {flags}") as run:
        trainer = dataclasses.replace(run.trainer, optimizer=optimizer(run))
        with run.batches.loader(TRAIN, 0) as batches:
            trainer.step(batches).result()
            trainer.optimizer.state_dict()  # FusedAdam looks back at its step before, if any
            with NoWaiting([state["step"] for state in trainer.optimizer.state.values()]):
                begun = trainer.step(batches)
            assert begun.result().grad_norm > 0.1


def build_torch_adam(run: Run) -> torch.optim.Optimizer:
    groups = [
        {k: group[k] for k in ("params", "decays", "at_ends")}
        for group in run.trainer.optimizer.param_groups
    ]
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def fused(run: Run) -> FusedAdam:
    groups = [{**group, "fused": True} for group in run.trainer.optimizer.param_groups]
    return FusedAdam(groups, lr=0.1)


@pytest.mark.parametrize(
    "flags", ["--zero-stage 1 --swiglu", ALL_THREE, "--bf16 --zero-stage 3", EXPERTS]
)
@ranks(4, timeout=120)
def test_nothing_is_read_from_the_device_before_the_numbers_are_asked_for(flags):
    read_nothing(flags, fused)


@ranks(1)
def test_an_optimizer_that_cannot_skip_by_itself_makes_the_host_wait():
    with pytest.raises(AssertionError, match="the host waits"):
        read_nothing("", build_torch_adam)


def numbers_of(log: str) -> str:
    return re.sub(r"(elapsed|samples per|tokens per|TFLOP|Loss|loss fell|speed).*", "", log)


@pytest.mark.parametrize("stop", ["", "--exit-interval 5 "])
@ranks(2, timeout=120)
def test_numbers_read_an_iteration_later_are_the_same_and_in_their_place(stop, tmp_path):
    flags = (
        "--train-iters 7 --zero-stage 2 --eval-iters 1 --eval-interval 3 --save-interval 2 "
        f"--keep-checkpoints 1 --log-interval 2 {stop}"
    )
    first, second = (
        read(flags + f"--save {Path(tmp_path, read.__name__)}")
        for read in (log_of, log_of_asynchronous)
    )
    folder = r"log_of(_asynchronous)?"
    first, second = (re.sub(folder, "", numbers_of(log)) for log in (first, second))
    assert first == second


@pytest.mark.parametrize("log", [log_of, log_of_asynchronous])
@ranks(1)
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_iteration(log):
    with pytest.raises(InputError, match=r"is (nan|inf) at iteration \d+, and no update was made"):
        log("--train-iters 20 --lr 1e12 --lr-decay-style constant --clip-grad 0")


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
