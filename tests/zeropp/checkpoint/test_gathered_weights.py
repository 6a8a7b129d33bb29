"""A file of gathered 16-bit weights loads into the plain model, tied weights included."""

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters
from tests.zeropp.small_model import SmallModel, small_model


class Tied(SmallModel):
    """The small model with its head as a separate module, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(3))


def tied() -> Tied:
    torch.manual_seed(5)
    return Tied()


@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(2)
def test_the_plain_model_loads_what_a_sharded_one_saved(stage, tmp_path):
    engine = engine_of(tied(), stage=stage, bf16={"enabled": True})
    expected = {
        name: weight.bfloat16().float()
        for name, weight in gathered_parameters(engine.module).items()
    }
    engine.save_16bit_model(tmp_path / "new")
    engine.save_16bit_model(tmp_path / "new", "model.safetensors")
    dist.barrier()
    by_torch, by_safetensors = Tied(), Tied()
    saved = torch.load(tmp_path / "new/pytorch_model.bin", weights_only=True)
    assert saved["embedding.weight"].dtype == torch.bfloat16
    assert saved["embedding.weight"].data_ptr() == saved["head.weight"].data_ptr()
    by_torch.load_state_dict(saved)
    stored = safetensors.torch.load_file(tmp_path / "new/model.safetensors")
    assert {"embedding.weight", "head.weight"} & set(stored) == {"embedding.weight"}
    safetensors.torch.load_model(by_safetensors, tmp_path / "new/model.safetensors")
    for model in (by_torch, by_safetensors):
        assert model.head.weight is model.embedding.weight and model.seen.tolist() == [0, 1, 2]
        for name, weight in model.named_parameters():
            assert torch.equal(weight.detach(), expected[name])


@ranks(1)
def test_one_rank_in_fp16_writes_fp16(tmp_path):
    engine = engine_of(fp16={"enabled": True})
    path = engine.save_16bit_model(tmp_path)
    saved = torch.load(path, weights_only=True)
    for name, weight in small_model().named_parameters():
        assert torch.equal(saved[name], weight.detach().half())
