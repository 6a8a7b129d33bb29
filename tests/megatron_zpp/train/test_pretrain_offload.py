"""Training with ZeRO-Offload: switched on, switched off, and resumed."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.model.gpt import GPT
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe import model as recipe
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.recipe.model import build_model, build_optimizer
from megatron_zpp.settings.arguments import parse
from tests.launched import ROOT
from tests.megatron_zpp.train.training_runs import TINY, field, log_of, losses, with_json
from tests.ranks import ranks
from zeropp import InputError
from zeropp.capabilities.offload import host_masters
from zeropp.ranks.topology import Environment

TUTORIAL = (
    "--num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --batch-size 10 "
    "--tokenizer-type NullTokenizer --vocab-size 50176 --checkpoint-activations --lr 1e-4 --bf16 "
    "--mock-data --train-iters 10 "
)
FLAGS = "--train-iters 4 --global-batch-size 4 --micro-batch-size 1 --bf16 "


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2, timeout=120)
def test_the_log_says_that_the_state_is_on_the_host(stage):
    flags = f"{FLAGS} --zero-stage {stage} --log-params-norm "
    log, without = log_of(f"{flags} --cpu-optimizer"), log_of(flags)
    if dist.get_rank() == 0:  # who has the log
        assert "on the host: fp32 weights, gradients, moments, step" in log
        assert "parameters of this rank in host memory" in log
    assert losses(log) == losses(without)
    assert field(log, "params norm") == field(without, "params norm")


@ranks(2, timeout=120)
def test_the_tutorials_command_with_its_flags():
    """Of the ZeRO-Offload tutorial, old names included, on a smaller model."""
    log = log_of(
        "--model-parallel-size 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        f"--batch-size 1 --deepspeed_config {ROOT}/examples/ds_zero_offload.json "
        "--checkpoint-activations --cpu-optimizer --cpu_torch_adam --train-iters 3"
    )
    if dist.get_rank() == 0:
        assert "torch_adam has no effect here: the offloaded AdamW is ours" in log
        assert len(losses(log)) == 3 and "on the host" in log and "ZeRO stage" in log


def ranks_of_a_device(count: int) -> Ranks:
    """The ranks of this test; a device without memory stands in for their GPUs."""
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("data",))
    return Ranks(environment=Environment.read(), device=torch.device("meta"), mesh=mesh, store=None)


@pytest.mark.parametrize(("more", "frozen"), [("", "meta"), ("--remote-device cpu", "cpu")])
@ranks(2)
def test_frozen_weights_are_on_the_device(more, frozen):
    """They have no masters."""
    flags = "--mock-data --lora-rank 4 --pretrained-checkpoint m --bf16 --zero-stage 3 "
    config = parse(f"{TINY}{flags}--cpu-optimizer {more}".split(), 2)
    joined = ranks_of_a_device(2)
    model = build_model(config, 50, joined, apex=None, fill=lambda _: None).model
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("cpu" if parameter.requires_grad else frozen), name


@pytest.mark.parametrize(
    ("gradients", "batch", "width", "ratio"),
    [("fp32", 10, 18, 0.72), ("bf16", 10, 16, 0.81), ("bf16", 20, 18, 0.72)],
)
@ranks(1)
def test_the_tutorials_model_is_refused_before_it_has_memory(gradients, batch, width, ratio):
    """12 bytes of fp32 weight and moments, 2 of the rounded one, the rest for gradients."""
    elements = 50 * (12 * 4096**2 + 13 * 4096) + (50176 + 1024 + 2) * 4096
    needed, free, joined = width * elements, 125 * 2**30, ranks_of_a_device(1)

    def build(ratio: float, free: int) -> None:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
        more = {"data_types": {"grad_accum_dtype": gradients}}
        flags = f"{TUTORIAL}--global-batch-size {batch} {with_json(zero, more=more)}"
        config = parse(flags.split(), 1)
        with patch.object(host_masters, "free_bytes", lambda: free):
            with patch.object(recipe, "allocate_parameters", side_effect=MemoryError):
                build_model(config, 50176, joined, apex=None)

    message = rf"needs {needed / 2**30:.1f} GiB .* and 125\.0 are free.*ratio = {ratio}$"
    for share, at, refused in (
        (1.0, free, message),
        (1.0, needed - 1, ""),
        (ratio + 0.01, free, ""),
    ):
        with pytest.raises(InputError, match=refused):
            build(share, at)
    for share, at in ((1.0, needed), (ratio, free)):
        with pytest.raises(MemoryError):
            build(share, at)


@ranks(1)
def test_weights_that_are_there_count_once():
    """Masters are in their memory: 18 bytes of a parameter, of which 4 are there."""
    config = parse(f"{TINY}--mock-data --bf16 --zero-stage 2 --cpu-optimizer".split(), 1)
    joined, refused = ranks_of_a_device(1), pytest.raises(InputError, match="GiB of host memory")
    needed = 18 * GPT(config.model, 50).num_parameters()
    own = capabilities_of(config, joined)
    with patch.object(host_masters, "free_bytes", lambda: needed):
        sharding = build_model(config, 50, joined, apex=None, capabilities=own)
    held = sum(each.to_local().nbytes for each in sharding.model.parameters())
    with patch.object(host_masters, "free_bytes", lambda: needed - held - 1), refused:
        build_optimizer(sharding, config.optimizer, joined.device, None, own)
    with patch.object(host_masters, "free_bytes", lambda: needed - held):
        build_optimizer(sharding, config.optimizer, joined.device, None, own)


@ranks(2, timeout=180)
def test_a_stop_changes_no_digit_and_offload_may_be_switched_off(tmp_path):
    off, on = (f"{FLAGS} --zero-stage 3 {flag} " for flag in ("", "--cpu-optimizer"))
    saved = f"--load {tmp_path} --save-interval 2 --save {tmp_path} "
    whole = losses(log_of(on))
    first = losses(log_of(on + saved + "--exit-interval 2"))
    assert losses(log_of(f"{off} --load {tmp_path}")) == whole[2:]
    assert first + losses(log_of(on + saved)) == whole


@ranks(2, timeout=180)
def test_a_stop_with_an_update_under_way_changes_no_digit(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    late = FLAGS + with_json(zero, delayed_param_update=True, delayed_param_update_warmup=2)
    late += "--train-iters 6 --log-optimizer-states-to-tensorboard "
    late += f"--tensorboard-dir {tmp_path / 'events'} "
    saved = f"--load {tmp_path} --save {tmp_path} "
    log = log_of(late)
    whole = losses(log)
    first = losses(log_of(late + saved + "--save-interval 4 --exit-interval 4"))
    assert first + losses(log_of(late + saved)) == whole
    at_once = losses(log_of(f"{FLAGS} --train-iters 6 --zero-stage 3 --cpu-optimizer"))
    if dist.get_rank() == 0:
        assert whole[:3] == at_once[:3] and whole != at_once
        assert "beside the next step, after 2 steps" in log
