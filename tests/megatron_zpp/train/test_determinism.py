"""--deterministic-mode: what has no deterministic kernel is refused, and a run still trains."""

import os

import pytest
import torch

from megatron_zpp.train.determinism import deterministic_kernels
from tests.megatron_zpp.train.training_runs import log_of, losses
from tests.ranks import ranks


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


RUN = "--micro-batch-size 2 --train-iters 3 --mock-data --hidden-dropout 0.1 "


@ranks(1, timeout=120)
def test_a_run_has_deterministic_kernels_for_all_that_it_does() -> None:
    usual = log_of(RUN)
    with deterministic_kernels():
        deterministic = log_of(RUN)
    assert losses(usual) == losses(deterministic)
