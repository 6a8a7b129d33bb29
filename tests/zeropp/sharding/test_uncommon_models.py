"""Models with parameters, modules or settings that few models have: they train, or say why not."""

import re

import pytest
import torch
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, run
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError

FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
FORMATS["fp16"] = {"fp16": {"enabled": True, "initial_scale_power": 4}}


class WithEmpty(nn.Module):
    """The small model, with parameters of no elements beside it and in one of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.rows = nn.Parameter(torch.zeros(0, 4))
        self.model.blocks[1].columns = nn.Parameter(torch.zeros(4, 0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens) + self.rows.sum()


@pytest.mark.parametrize(("stage", "name"), [(0, "bf16"), (1, "fp32"), (2, "fp16"), (3, "bf16")])
@ranks(2)
def test_parameters_without_elements_change_nothing(stage, name, tmp_path):
    quantized = {"stage": stage} | ({"zero_quantized_weights": True} if stage == 3 else {})
    settings = dict(zero_optimization=quantized, micro_batches=2, **FORMATS[name])
    engine = engine_of(WithEmpty(), **settings)
    assert run(engine, 2) == run(engine_of(**settings), 2)
    engine.save_checkpoint(tmp_path)
    again = engine_of(WithEmpty(), **settings)
    again.load_checkpoint(tmp_path)
    assert run(again, 1, first=2) == run(engine, 1, first=2)
    assert engine.module.state_dict()["rows"].shape == (0, 4)


@ranks(2)
def test_float64_and_sparse_gradients_are_refused_before_anything_changes():
    sparse = small_model()
    sparse.embedding.sparse = True
    for model, message in (
        (small_model().double(), "parameter embedding.weight is torch.float64, and the widest"),
        (sparse, "the Embedding embedding has sparse gradients"),
    ):
        before = list(model.parameters())
        with pytest.raises(InputError, match=re.escape(message)):
            engine_of(model)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    sparse.embedding.requires_grad_(False)
    engine_of(sparse)


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_an_engine_may_be_made_where_its_model_is_recorded(stage):
    with zeropp.zero.Init():
        torch.manual_seed(5)
        model = SmallModel()
        engine, optimizer, *_ = zeropp.initialize(model=model, config=config_of(stage))
        torch.ones(3).tolist()  # recorded again
    assert run(engine, 2) == run(engine_of(stage=stage), 2)


@pytest.mark.parametrize("name", FORMATS)
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
    assert any("only stage 3 shards the weights" in line for line in below.notices)
