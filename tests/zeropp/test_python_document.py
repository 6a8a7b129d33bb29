"""Every statement of docs/python.md runs, in the order of the document."""

import copy
import json
import os
import re
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import zeropp
from tests.documents import ROOT
from tests.ranks import ranks

CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}


class Net(nn.Module):
    """Takes a batch as the document's first loop gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks[0](inputs)), labels)


class HuggingFaceLike(Net):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(input_ids.float(), labels[:, 0]))


@ranks(2)
def test_every_python_block_runs(tmp_path):
    os.chdir(tmp_path)
    text = (ROOT / "docs/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    first, saving, copying, sharding, updating, building, gathering = blocks
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    model = Net()
    dataset = TensorDataset(torch.rand(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
    names = {"model": model, "dataset": dataset, "Net": Net, "torch": torch, "dist": dist}
    names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "zeropp": zeropp}
    names |= {"init_device_mesh": init_device_mesh, "copy": copy}
    exec(first, names)
    assert names["engine"].global_steps == 2
    exec(saving, names)
    assert names["client_state"] == {"epoch": 3}
    exec(copying, names)
    assert type(names["average"]) is Net
    exec(gathering, names)
    with zeropp.zero.GatheredParameters(names["model"].head.weight):
        assert names["model"].head.weight.abs().sum() == 0
    names |= {"model": HuggingFaceLike(), "inputs": torch.ones(2, 4, dtype=torch.long)}
    exec(sharding, names)
    exec(updating, names)
    assert type(names["optimizer"]) is zeropp.FusedAdam
    exec(building, names)
    assert type(names["model"]) is Net
