"""Training on a GPU: the losses of a run on the CPU, and the same digits every time."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_zpp.train.pretrain import deterministic_kernels
from tests.gpu import GPU, MARKS
from tests.launched import ROOT, zeropp
from tests.megatron_zpp.train.training_runs import TINY, log_of, loss_values, losses
from tests.ranks import ranks

pytestmark = MARKS
FLAGS = "--train-iters 20 --global-batch-size 8 --micro-batch-size 1 --seed 3 "
QUIET = FLAGS + "--hidden-dropout 0 --attention-dropout 0 "
ALL_THREE = f"--deepspeed_config {ROOT}/examples/ds_zeropp_two_nodes.json "
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --num-query-groups 2"
SHARED_GPU_NCCL = (2, 30)


@pytest.mark.parametrize("flags", ["", LLAMA, "--reset-attention-mask", "--compile"])
@ranks(1, timeout=180)
def test_losses_in_fp32_are_those_of_the_cpu(flags):
    """Sums in another order: 1e-7 each, which 20 steps of Adam at 1e-2 make 1e-4."""
    expected = loss_values(log_of(QUIET + flags.replace("--compile", "")))
    assert loss_values(log_of(QUIET + flags, GPU)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "flags", ["--bf16", "--fp16 --initial-loss-scale 1024", "--bf16 --compile",
              "--bf16 --reset-attention-mask"],
)  # fmt: skip
@ranks(1, timeout=180)
def test_losses_in_16_bit_follow_those_in_fp32(flags):
    """16-bit weights and activations: 1% of a loss that falls by a fifth."""
    mask = "--reset-attention-mask" if "mask" in flags else ""
    wide, narrow = loss_values(log_of(QUIET + mask, GPU)), loss_values(log_of(QUIET + flags, GPU))
    assert narrow == pytest.approx(wide, rel=1e-2) and narrow[-1] < narrow[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(4, timeout=180)
def test_four_ranks_share_the_gpu(stage):
    flags = f"{QUIET} --zero-stage {stage}"
    assert loss_values(log_of(flags, GPU)) == pytest.approx(loss_values(log_of(flags)), rel=1e-4)


@ranks(4, timeout=180)
def test_zeropp_on_four_ranks_follows_the_cpu():
    """The same codes but for those that a last bit flips."""
    flags = QUIET + ALL_THREE
    assert loss_values(log_of(flags, GPU)) == pytest.approx(loss_values(log_of(flags)), rel=3e-2)


@pytest.mark.parametrize("flags", ["--bf16", "--bf16 --compile", "--bf16 --reset-attention-mask"])
@ranks(1, timeout=180)
def test_the_same_command_prints_the_same_digits(flags):
    assert losses(log_of(FLAGS + flags, GPU)) == losses(log_of(FLAGS + flags, GPU))


@ranks(1, timeout=180)
def test_a_stop_in_the_middle_changes_no_digit(tmp_path):
    folder = f"--bf16 --save {tmp_path}/saved --load {tmp_path}/saved --save-interval 10 "
    first = losses(log_of(FLAGS + folder + "--exit-interval 10", GPU))
    rest = losses(log_of(FLAGS + folder, GPU))
    assert first + rest == losses(log_of(FLAGS + "--bf16", GPU))


def test_nccl_among_ranks_of_one_gpu(tmp_path):
    """Losses over gloo, from sums over other orders of the ranks; the launcher as people use it."""
    if torch.cuda.nccl.version()[:2] < SHARED_GPU_NCCL:
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} does not let ranks share a GPU; 2.30 does")
    by_nccl, by_gloo = (launched(backend, tmp_path) for backend in ("nccl", "gloo"))
    assert by_nccl == pytest.approx(by_gloo, rel=1e-5)


def launched(backend: str, folder: Path) -> list[float]:
    """The losses of four ranks on this GPU that exchange data by `backend`."""
    flags = f"{TINY} {QUIET} {ALL_THREE} --mock-data --distributed-backend {backend}"
    process = subprocess.run(
        zeropp(4, "pretrain_gpt.py", flags),
        env={**os.environ, "PYTHONPATH": str(ROOT), "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        cwd=folder, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return loss_values(process.stdout)


@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --reset-attention-mask", LLAMA])
@ranks(1, timeout=180)
def test_deterministic_kernels_do_all_that_a_run_does(flags):
    with deterministic_kernels():
        assert losses(log_of(FLAGS + flags, GPU)) == losses(log_of(FLAGS + flags, GPU))
