"""The documentation builds as a site, and its API reference has every public name.

Public functions say what each parameter is, what they return and what they raise, and their
examples run as they are printed.
"""

import inspect
import re
import subprocess
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeropp
from tests.ranks import ranks
from zeropp import deepspeed, zero

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = (
    zeropp.shard, zeropp.optimizer_step, zeropp.attach, zeropp.local_steps,
    deepspeed.init_distributed, deepspeed.add_config_arguments, deepspeed.get_accelerator,
)  # fmt: skip


class Model(nn.Module):
    """Two blocks, as the examples expect."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def example(function: Callable) -> str:
    """The code of the example in a function's description."""
    (code,) = re.findall(r"Example:\n    ```python\n(.*?)    ```", inspect.getdoc(function), re.S)
    return textwrap.dedent(code)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_parameter_is_described(function: Callable) -> None:
    text, signature = inspect.getdoc(function), inspect.signature(function)
    described = re.findall(
        r"^    (\w+): \S", text.partition("Args:\n")[2].partition("\n\n")[0], re.M
    )
    assert described == list(signature.parameters)
    assert ("Returns:\n" in text) == (signature.return_annotation not in (None, "None"))
    assert ("Raises:\n" in text) == ("raise" in inspect.getsource(sys.modules[function.__module__]))
    assert example(function)


@ranks(2, timeout=60)
def test_the_examples_run_as_printed() -> None:
    known = dict(
        zeropp=zeropp, deepspeed=deepspeed, dist=dist, ArgumentParser=ArgumentParser,
        init_device_mesh=init_device_mesh, fully_shard=fully_shard,
        model=Model(), inputs=torch.ones(4, 64),
    )  # fmt: skip
    before = known["model"].blocks[0].weight.detach().clone()
    for function in FUNCTIONS:
        if function in (zeropp.attach, zeropp.local_steps):
            known["model"] = Model()
        exec(example(function), known)
        if function is zeropp.optimizer_step:
            after = known["model"].blocks[0].weight.full_tensor()
            assert not torch.equal(after, before)
    assert known["attached"].skipped == {} and known["args"].deepspeed_config == "ds_config.json"


def test_every_public_name_has_an_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "api/index.html").read_text()
    names = [f"zeropp.{name}" for name in zeropp.__all__ if name not in ("optim", "zero")]
    kinds = {name: getattr(zeropp.optim, name) for name in zeropp.optim.__all__}
    kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, type)}
    optimizers = [name for name in kinds if issubclass(kinds[name], torch.optim.Optimizer)]
    names += [f"zeropp.optim.{name}" for name in optimizers if name not in zeropp.__all__]
    names += [f"zeropp.zero.{name}" for name in zero.__all__]
    names += ["zeropp.Engine.save_checkpoint", "zeropp.Attached.exact_weights"]
    assert [name for name in names if f'id="{name}"' not in page] == []
    assert "Raises InputError" in page
