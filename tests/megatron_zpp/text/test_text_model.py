"""A model on several ranks: rank 0 generates and scores, the other ranks follow."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.checkpoint.open_model import open_checkpoint
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.text.generate import Request, complete
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.text.text_model import (
    TextModel,
    TextModelConfig,
    open_text_model,
    shard_text_model,
)
from megatron_zpp.tokenizer.base import ByteLevelTokenizer
from tests.megatron_zpp.text.text_models import save_text_model
from tests.ranks import ranks
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment
from zeropp.wire.quantized_shard import is_quantized

REQUESTS = [
    Request(prompt=tuple(b"ab"), max_new_tokens=7, sampling=Sampling(seed=1)),
    Request(prompt=tuple(b"hello"), max_new_tokens=3, sampling=Sampling(temperature=0)),
]
SHARDED = {
    "stage 3": {},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "ZeRO++": {"zero_optimization": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2}},
}


def joined() -> Ranks:
    """The ranks of this test."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    place = Environment.read()
    return Ranks(environment=place, device=torch.device("cpu"), mesh=mesh, store=None)


def alone(folder: Path, **settings: str) -> TextModel:
    config = TextModelConfig(load=str(folder), **settings)
    return open_text_model(config, TokenizerConfig(), Environment(), open_checkpoint)


def test_on_one_rank_it_is_the_model_of_the_checkpoint(tmp_path: Path) -> None:
    saved = save_text_model(tmp_path / "saved")
    opened = alone(tmp_path / "saved")
    assert opened.name == "saved" and not opened.model.training and opened.sharding is None
    texts = ["", ""]
    for piece in opened.stream(REQUESTS):
        texts[piece.row] += piece.text
    assert texts == complete(saved, opened.tokenizer, REQUESTS)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_16_bit_the_weights_take_half(dtype: str, tmp_path: Path) -> None:
    save_text_model(tmp_path)
    opened = alone(tmp_path, dtype=dtype)
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert {parameter.dtype for parameter in opened.model.parameters()} == {expected}
    assert [piece.finish_reason for piece in opened.stream(REQUESTS)][-1] in ("length", "stop")


def test_requests_are_checked_before_they_are_broadcast(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    with pytest.raises(InputError, match="65 tokens, but the model has 64 positions"):
        alone(tmp_path).stream([*REQUESTS, Request(prompt=(1,) * 65)])


@ranks(4, ranks_per_node=2)
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [(SHARDED["stage 3"], "fp32"), (SHARDED["stage 1"], "bf16"), (SHARDED["ZeRO++"], "fp32"),
     (SHARDED["ZeRO++"], "bf16")],
)  # fmt: skip
def test_on_ranks(settings: dict, dtype: str, tmp_path: Path) -> None:
    """Whole texts, one that is left early, one that is cancelled, and whole texts again.

    In fp32 the texts are those of the whole model; in 16 bit, where a shard's gather may round
    another way than a whole weight does, those of every time.
    """
    whole = save_text_model(tmp_path / "saved")
    expected = complete(whole, ByteLevelTokenizer(), REQUESTS)
    file = tmp_path / f"{dist.get_rank()}.json"
    file.write_text(json.dumps(settings))
    config = TextModelConfig(load=str(tmp_path / "saved"), dtype=dtype, deepspeed_config=str(file))
    model = shard_text_model(config, None, joined(), open_checkpoint)
    assert model.sharding.num_ranks == 4
    if dist.get_rank():
        model.follow()
        return
    texts = []
    for _ in range(2):
        texts.append(["", ""])
        for piece in model.stream(REQUESTS):
            texts[-1][piece.row] += piece.text
        pieces = model.stream(REQUESTS)
        next(pieces)
        pieces.close()
        ends = [piece.finish_reason for piece in model.stream(REQUESTS, lambda row: row == 0)]
        assert ends[0] == "cancelled" and ends[-1] in ("length", "stop")
    model.close()
    assert texts[0] == texts[1]
    if dtype == "fp32" and not settings:
        assert texts[0] == expected


@ranks(4, ranks_per_node=2)
def test_weights_stored_as_codes_cross_nodes_once_for_all_tokens(tmp_path: Path) -> None:
    zero = {
        "stage": 3, "zero_quantized_nontrainable_weights": True, "zero_hpz_partition_size": 2
    }  # fmt: skip
    save_text_model(tmp_path / "saved")
    file = tmp_path / f"{dist.get_rank()}.json"
    file.write_text(json.dumps({"zero_optimization": zero, "zeropp": {"ranks_per_node": 2}}))
    config = TextModelConfig(load=str(tmp_path / "saved"), deepspeed_config=str(file))
    model = shard_text_model(config, None, joined(), open_checkpoint)
    matrices = [parameter for parameter in model.model.parameters() if parameter.ndim >= 2]
    assert matrices and all(map(is_quantized, matrices))
    if dist.get_rank():
        model.follow()
        return
    crossed = []
    for request in (*REQUESTS, *REQUESTS):
        model.sharding.traffic.take()
        assert sum(piece.num_tokens for piece in model.stream([request])) > 0
        crossed.append(model.sharding.traffic.take()["weights_forward", "across_nodes"])
    model.close()
    assert crossed[0] > 0 and not any(crossed[1:])
