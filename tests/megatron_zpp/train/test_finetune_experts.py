"""Fine-tuning a mixture of experts with adapters on the experts."""

import peft
import pytest
import torch

from megatron_zpp.interchange.conversion import export_adapters
from megatron_zpp.interchange.open_model import load_model, open_model
from tests.megatron_zpp.interchange.foreign_models import logits, qwen2_moe
from tests.megatron_zpp.train.finetuning import MIXZ, flags_for, folder_of
from tests.megatron_zpp.train.training_runs import (
    built_run,
    loss_values,
    losses,
    run,
    with_json,
)
from tests.ranks import ranks
from zeropp.wire.quantized_shard import is_quantized

NAMES = ("attention.qkv", "experts.gate", "experts.input", "experts.output")
EXPERTS = f"--lora-target-modules {' '.join(NAMES)} "
EP1, EP2, EP4 = (f"--expert-model-parallel-size {size} " for size in (1, 2, 4))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a tiny mixture, one of whose four layers is dense, and of examples for it."""
    model = qwen2_moe(vocab_size=104, num_experts=8, num_hidden_layers=4, mlp_only_layers=[1])
    return flags_for(model, tmp_path_factory.mktemp("mixture")) + EXPERTS


def test_beside_codes_a_stop_changes_no_digit_and_peft_opens_the_result(base, tmp_path):
    nodes = with_json(MIXZ | {"zero_quantized_gradients": True}, ranks_per_node=2)
    flags, saved, out = f"{base} {EP2} {nodes}", tmp_path / "saved", tmp_path / "adapters"
    straight = run(4, f"{flags} --save {saved} --save-interval 2", tmp_path)
    second = run(4, f"{flags} --load {saved} --ckpt-step 2", tmp_path)
    assert losses(second) == losses(straight)[2:] != []
    first, *_, last = loss_values(straight)
    assert last < 0.9 * first
    exact = run(1, f"{base} --clip-grad 0.1 ", tmp_path)
    assert first == pytest.approx(loss_values(exact)[0], rel=0.005)  # what INT8 may move it by
    start, opened = open_model(folder_of(base)), open_model(saved)
    for name, before in start.tensors():
        is_adapted = name.removesuffix(".weight") in opened.added.layers
        moved = (opened.weights.read(name) - before).abs().max()
        assert (moved > 1e-3) == is_adapted, name
        assert is_adapted == name.removesuffix(".weight").endswith(NAMES), name
    export_adapters(opened, out)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(out).eval()
    merged, _ = load_model(saved)
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", [EP1, EP2, EP4])
@pytest.mark.parametrize("zero", [MIXZ, {"stage": 3, "zero_hpz_partition_size": 2}])
@ranks(4, ranks_per_node=2)
def test_only_adapters_cross_nodes_in_every_step(base, how, zero, tmp_path):
    """As foretold, which other tests compare with what is sent."""
    flags = base + how + with_json(zero, ranks_per_node=2)
    with built_run(flags) as built:
        sharding = built.trainer.sharding
    own, stores = 0, "zero_quantized_nontrainable_weights" in zero
    for name, parameter in sharding.model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        assert is_quantized(parameter) == (
            stores and not parameter.requires_grad and parameter.ndim > 1
        )
    for unit in sharding.plan.units:
        if unit.axis.nodes.num_ranks > 1:
            trained = [spec for spec in unit.specs if spec.trainable]
            assert trained == [] or len(trained) == len(unit.specs)
            own += sum(4 * spec.elements for spec in trained)  # fp32
    foretold = sharding.expected_traffic(1)
    padding = 16 * len(sharding.plan.units)
    for purpose in ("weights_forward", "gradients"):
        assert own <= foretold[purpose, "across_nodes"] <= own + padding
    assert foretold["weights_backward", "across_nodes"] == 0
