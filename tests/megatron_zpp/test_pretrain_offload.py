"""ZeRO-Offload in the whole job: switched on, off again, stopped and gone on with."""

import pytest
import torch.distributed as dist

from tests.launched import ROOT
from tests.megatron_zpp.pretraining import log_of, losses, numbers
from tests.ranks import ranks

FLAGS = "--train-iters 8 --global-batch-size 8 --micro-batch-size 1 --bf16 "


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2, timeout=120)
def test_the_log_says_that_the_state_is_on_the_host(stage):
    log = log_of(f"{FLAGS} --zero-stage {stage} --cpu-optimizer")
    if dist.get_rank() == 0:  # who has the log
        assert "on the host: fp32 weights, gradients, moments, step" in log
        assert "parameters of this rank in host memory" in log
    expected = numbers(log_of(f"{FLAGS} --zero-stage {stage}"))
    assert numbers(log) == pytest.approx(expected, rel=1e-4)  # PyTorch's Adam, and ours


@ranks(2, timeout=120)
def test_the_tutorials_command_with_its_flags():
    """Of the ZeRO-Offload tutorial, old names included, on a smaller model."""
    log = log_of(
        "--model-parallel-size 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        f"--batch-size 1 --deepspeed_config {ROOT}/examples/ds_zero_offload.json "
        "--checkpoint-activations --cpu-optimizer --train-iters 3"
    )
    if dist.get_rank() == 0:
        assert len(losses(log)) == 3 and "on the host" in log and "ZeRO stage" in log


@ranks(2, timeout=180)
def test_a_stop_changes_no_digit_and_offload_may_be_switched_off(tmp_path):
    off, on = (f"{FLAGS} --zero-stage 3 {flag} " for flag in ("", "--cpu-optimizer"))
    saved = f"--load {tmp_path} --save-interval 4 --save {tmp_path} "
    whole = losses(log_of(on))
    first = losses(log_of(on + saved + "--exit-interval 4"))
    switched = numbers(log_of(f"{off} --load {tmp_path}"))
    assert switched == pytest.approx([float(one) for one in whole[4:]], rel=1e-4)
    assert first + losses(log_of(on + saved)) == whole


@ranks(2, timeout=180)
def test_offload_may_be_switched_on_at_another_stage(tmp_path):
    off, on = (f"{FLAGS} --zero-stage {stage} " for stage in (1, 3))
    saved = f"--save {tmp_path} --save-interval 4 --exit-interval 4"
    whole = numbers(log_of(off))
    first = numbers(log_of(off + saved))
    rest = numbers(log_of(f"{on} --cpu-optimizer --load {tmp_path}"))
    assert first + rest == pytest.approx(whole, rel=1e-3)
