"""The rate of matrix products that MFU is a share of."""

import re

import pytest
import torch

from megatron_zpp.monitor import matrix_rate as rates
from tests.megatron_zpp.train.pretraining import field, log_of
from tests.ranks import ranks


def test_the_rate_is_operations_over_seconds_of_the_best_size(monkeypatch):
    seconds = {256: 1e-4, 512: 2e-4, 1024: 2e-3}  # 512 gives the most operations per second
    monkeypatch.setattr(rates, "_timed", lambda matrix, times: seconds[len(matrix)])
    assert rates.matrix_rate(torch.device("cpu"), torch.float32) == 2 * 512**3 / 2e-4


def test_a_product_that_takes_long_is_not_repeated(monkeypatch):
    asked = []

    def timed(matrix: torch.Tensor, times: int) -> float:
        asked.append(times)
        return 1.0

    monkeypatch.setattr(rates, "_timed", timed)
    rates.matrix_rate(torch.device("cpu"), torch.bfloat16)
    assert asked == [1, 1]


@ranks(1)
def test_the_log_says_the_rate_and_the_share_of_it():
    log = log_of("--train-iters 1 --log-throughput")
    rate = float(re.search(r"matrix products +│? *(\S+) TFLOP/s, measured", log)[1])
    (utilization,) = field(log, "MFU")
    assert rate > 0 and 0 < float(utilization.removesuffix("%")) < 100
    assert float(field(log, "throughput per GPU (TFLOP/s/GPU)")[0]) == pytest.approx(
        rate * float(utilization.removesuffix("%")) / 100, abs=0.06
    )
