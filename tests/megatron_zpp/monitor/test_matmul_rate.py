"""The measured rate of matrix products, and the data sheets' peaks that MFU is a share of."""

import re

import pytest
import torch

from megatron_zpp.monitor import matmul_rate
from megatron_zpp.monitor.matmul_rate import BY_NAME, peak_flops, peak_of
from tests.megatron_zpp.train.training_runs import field, log_of
from tests.ranks import ranks


def test_the_rate_is_operations_over_seconds_of_the_best_size(monkeypatch):
    seconds = {256: 1e-4, 512: 2e-4, 1024: 2e-3}  # 512 gives the most operations per second
    monkeypatch.setattr(matmul_rate, "_timed", lambda matrix, times: seconds[len(matrix)])
    assert matmul_rate.measure_matmul_rate(torch.device("cpu"), torch.float32) == 2 * 512**3 / 2e-4


def test_a_product_that_takes_long_is_not_repeated(monkeypatch):
    asked = []

    def timed(matrix: torch.Tensor, times: int) -> float:
        asked.append(times)
        return 1.0

    monkeypatch.setattr(matmul_rate, "_timed", timed)
    matmul_rate.measure_matmul_rate(torch.device("cpu"), torch.bfloat16)
    assert asked == [1, 1]


@ranks(1)
def test_a_processor_without_the_format_is_named_with_both_rates():
    def log_with(seconds: float, flags: str) -> str:
        def timed(matrix: torch.Tensor, times: int) -> float:
            return 2e-3 if matrix.dtype == torch.float32 else seconds

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(matmul_rate, "_timed", timed)
            return log_of(f"--train-iters 1 {flags}")

    operations = 2 * 256**3
    own, float32 = f"{operations / 1e8:.1f} GFLOP/s", f"{operations / 2e6:.1f}"
    for flag, name in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        log = log_with(0.1, flag)
        assert f"multiplies {name} at {own}, and float32 at {float32}: leave out --bf16" in log
    assert "leave out" not in log_with(0.1, "") + log_with(1e-3, "--bf16")


def test_the_peak_is_that_of_the_format():
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert peak_of("NVIDIA H100 80GB HBM3", bf16) == 989.5e12
    assert peak_of("NVIDIA A100-SXM4-40GB", fp16) == 312e12
    assert peak_of("Tesla V100-SXM2-32GB", fp16) == 125e12
    assert peak_of("Tesla V100-SXM2-32GB", bf16) is None
    assert peak_of("NVIDIA L40S", fp32) == 91.6e12


def test_fp32_products_use_tf32_where_pytorch_does(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    assert peak_of("Tesla V100-SXM2-16GB", torch.float32) == 15.7e12


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", ""],
)
def test_a_gpu_that_no_data_sheet_is_known_of_has_no_peak(name):
    assert peak_of(name, torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_tensor_cores_are_faster_than_fp32_on_every_listed_gpu():
    for name, peaks in BY_NAME.items():
        fp16, tf32 = peaks["fp16"], peaks.get("tf32", peaks["fp16"] / 2)
        assert peaks["fp32"] < fp16, name
        assert peaks.get("bf16", fp16) == fp16, name
        assert fp16 / tf32 == pytest.approx(2, rel=0.02), name


@ranks(1)
def test_the_log_says_the_rate_and_the_share_of_it():
    log = log_of("--train-iters 1 --log-throughput")
    rate = float(re.search(r"matrix products +│? *(\S+) TFLOP/s, measured", log)[1])
    (share,) = field(log, "share of measured matmul rate")
    assert "MFU" not in log  # no data sheet says what this processor could do
    assert rate > 0 and 0 < float(share.removesuffix("%")) < 100
    assert float(field(log, "throughput per GPU (TFLOP/s/GPU)")[0]) == pytest.approx(
        rate * float(share.removesuffix("%")) / 100, abs=0.06
    )
