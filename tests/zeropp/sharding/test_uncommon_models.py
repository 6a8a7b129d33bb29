"""Models with parameters, modules or settings that few models have: they train, or say why not."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.families import Named
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, run
from tests.zeropp.lora_model import add_adapters
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError

FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
FORMATS["fp16"] = {"fp16": {"enabled": True, "initial_scale_power": 4}}


@ranks(2)
def test_float64_and_sparse_gradients_are_refused_before_anything_changes():
    sparse = small_model()
    sparse.embedding.sparse = True
    for model, message in (
        (small_model().double(), "parameter embedding.weight is torch.float64, but an engine"),
        (sparse, "the Embedding embedding has sparse gradients"),
    ):
        before = list(model.parameters())
        with pytest.raises(InputError, match=re.escape(message)):
            engine_of(model)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    sparse.embedding.requires_grad_(False)
    engine_of(sparse)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@ranks(2)
def test_weights_on_the_host_need_no_optimizer_and_any_may_update_them_there(name):
    on_host = {"stage": 3, "offload_param": {"device": "cpu"}}
    settings = dict(zero_optimization=on_host, **FORMATS[name])
    model = small_model()
    config = config_of(**settings) | {"optimizer": {}}
    engine, *_ = zeropp.initialize(model=model, config=config)
    expected = engine_of(**FORMATS[name])
    with torch.no_grad():
        assert loss_of(engine, tokens_of(0)) == loss_of(expected, tokens_of(0))
    sgd = [
        zeropp.initialize(
            model=small_model(),
            config=config_of(**each) | {"optimizer": {}},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        )[0]
        for each in (settings, FORMATS[name])
    ]
    assert run(sgd[0], 3) == run(sgd[1], 3)
    below = zeropp.ZeroConfig.from_json(config_of(zero_optimization=on_host | {"stage": 2}))
    assert not below.offloads_weights
    assert any("only stage 3 shards the weights" in line for line in below.notices())


ON_HOST = {"offload_optimizer": {"device": "cpu"}}


@ranks(2)
def test_0d_parameters_beside_frozen_weights_that_are_stored_quantized():
    def model(trained: bool) -> Named:
        named = Named()
        add_adapters(named.model)
        named.gain.requires_grad_(trained)
        return named

    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True}
    engine = engine_of(model(True), zero_optimization=zero)
    losses = run(engine, 3)
    assert engine.module.gain != 1 and losses[2] < losses[0]
    engine = engine_of(model(False), zero_optimization=zero)
    run(engine, 2)
    assert engine.module.gain == 1


TRACKED = {"track_running_stats": True}


class Normed(nn.Module):
    """Layers that keep statistics, in blocks and beside them, one of them a block itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU()),
                nn.BatchNorm1d(8),
                nn.Sequential(nn.Conv1d(8, 8, 1), nn.InstanceNorm1d(8, affine=True, **TRACKED)),
            ]
        )  # fmt: skip
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.mean(-1))


STATISTICAL = {
    "stage 0, fp16": dict(stage=0, **FORMATS["fp16"]),
    "stage 1, bf16": dict(stage=1, micro_batches=2, **FORMATS["bf16"]),
    "stage 3, quantized": dict(
        zero_optimization={
            "stage": 3,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 2,
            "zero_quantized_gradients": True,
        },
        zeropp={"weight_steps": True},
        **FORMATS["bf16"],
    ),
    "stage 3, offloaded": dict(zero_optimization={"stage": 3, **ON_HOST}, **FORMATS["bf16"]),
}


@pytest.mark.parametrize(
    ("name", "given_in"),
    [*((name, torch.float32) for name in STATISTICAL), ("stage 1, bf16", torch.bfloat16)],
)
@ranks(4, ranks_per_node=2)
def test_statistics_of_batches_are_kept_in_fp32_while_16_bit_is_computed(name, given_in, tmp_path):
    """As autocast does, but for the biases, which that leaves in fp32.

    Activations are below 3. A dozen roundings to 2^-9 of them are 0.05 off at most, INT8 codes of
    five layers of weights another 2^-8 each in 8 channels.
    """
    settings, model = STATISTICAL[name], Normed().to(given_in)
    plain = copy.deepcopy(model).float()
    engine = engine_of(model, **settings)
    layers = {each for each, module in plain.named_modules() if hasattr(module, "running_mean")}
    assert len(layers) == 4
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randn(2, 8, 3, 9, generator=generator).to(given_in).float()
    for x in batches[: engine.gradient_accumulation_steps()]:
        output = engine(x)
        with torch.autocast("cpu", engine.sharding.compute_dtype):
            expected = plain(x)
        tolerance = 0.2 if "quantized" in name else 0.05
        torch.testing.assert_close(output.float(), expected.float(), rtol=0, atol=tolerance)
        assert output.dtype == engine.sharding.compute_dtype
        engine.backward(output.float().square().mean())
        engine.step()
    for layer in layers:
        statistics = engine.module.get_submodule(layer).running_mean
        assert statistics.dtype == torch.float32
        torch.testing.assert_close(
            statistics, plain.get_submodule(layer).running_mean, rtol=0, atol=0.02
        )
    if engine.sharding.stage and engine.gradient_accumulation_steps() == 1:
        sent = engine.sharding.traffic.take()
        expected = engine.sharding.expected_traffic()
        assert expected["weights_forward", "in_node"] == sent["weights_forward", "in_node"]
    engine.save_checkpoint(tmp_path)
    again = engine_of(Normed(), **settings)
    again.load_checkpoint(tmp_path)
    engine.eval(), again.eval()
    with torch.no_grad():
        assert torch.equal(engine(batches[0]), again(batches[0]))
