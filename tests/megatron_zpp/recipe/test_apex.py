"""Apex, with fake packages for both of that name; the real one needs a GPU.

NVIDIA's fake has the constructor arguments and parameter names of the real one, counts steps by
group as it does, and computes with plain torch.
"""

import copy
import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.part import Part
from megatron_zpp.recipe.model import ApexAdam, find_apex
from tests.megatron_zpp.model.small import GPT2, LLAMA, VOCABULARY, build, rows
from tests.ranks import ranks

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
NORMALIZATION = """
import torch
class FusedLayerNorm(torch.nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True):
        super().__init__(normalized_shape, eps, elementwise_affine)
class FusedRMSNorm(torch.nn.RMSNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True):
        super().__init__(normalized_shape, eps, elementwise_affine)
"""
OPTIMIZERS = """
import torch
class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                 adam_w_mode=True, weight_decay=0.0):
        assert adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                assert type(p.data) is type(p.grad.data) is torch.Tensor and p.numel()
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                m.lerp_(p.grad, 1 - first)
                v.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                root = (v / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.addcdiv_(m, root, value=-group["lr"] / (1 - first ** group["step"]))
"""
NVIDIA = {"__init__": "", "normalization": NORMALIZATION, "optimizers": OPTIMIZERS}
PYRAMID = {"__init__": "raise SystemExit('a web toolkit was imported')", "models": ""}
UNBUILT = NVIDIA | {
    "optimizers": "class FusedAdam:\n    def __init__(self, params):\n"
    "        raise RuntimeError('FusedAdam requires cuda extensions')\n"
}
BROKEN = NVIDIA | {"normalization": "import no_such_extension"}
SETTINGS = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


def install(folder: Path, files: dict[str, str]) -> None:
    package = folder / "apex"
    package.mkdir()
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    unload_apex()
    sys.path.insert(0, str(folder))


def unload_apex() -> None:
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def clean_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    unload_apex()


@pytest.mark.parametrize(
    ("files", "device", "said"),
    [
        (NVIDIA, CUDA, "using NVIDIA Apex's fused normalization and Adam"),
        (NVIDIA, CPU, ""),
        (PYRAMID, CUDA, "not NVIDIA Apex (no apex.normalization)"),
        (None, CUDA, ""),
        (UNBUILT, CUDA, "not usable (FusedAdam requires cuda extensions)"),
        (BROKEN, CUDA, "not usable (No module named 'no_such_extension')"),
    ],
    ids=["NVIDIA's", "on a CPU", "the other package", "none", "without extensions", "broken"],
)
def test_which_package_is_used(files, device, said, tmp_path: Path, caplog) -> None:
    """One that is not used is not imported, and the log says why."""
    caplog.set_level(logging.INFO, logger="megatron_zpp")
    if files is not None:
        install(tmp_path, files)
    apex = find_apex(device)
    assert said in " ".join(caplog.messages) and bool(said) == bool(caplog.messages)
    if said.startswith("using"):
        norms = [apex.layer_norm.__name__, apex.rms_norm.__name__]
        assert norms == ["FusedLayerNorm", "FusedRMSNorm"]
        assert apex.adam.__module__ == "apex.optimizers"
    else:
        assert apex is None
        assert ("apex" in sys.modules) <= ("not usable" in said)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["LayerNorm", "RMSNorm"])
def test_fused_norms(config, tmp_path: Path) -> None:
    """All are replaced, on meta too; names, weights and results stay."""
    install(tmp_path, NVIDIA)
    plain = build(config).eval()
    with torch.device("meta"):
        fused = GPT(config, VOCABULARY, Part(norms=find_apex(CUDA).norms))
    assert all(parameter.is_meta for parameter in fused.parameters())
    fused.to_empty(device="cpu")
    initialize(fused.eval(), 1, config)
    norms = [m for m in fused.modules() if type(m).__module__ == "apex.normalization"]
    assert len(norms) == 2 * config.num_layers + 1
    assert not [m for m in fused.modules() if type(m) in (nn.LayerNorm, nn.RMSNorm)]
    assert list(fused.state_dict()) == list(plain.state_dict())
    tokens = rows()[:, :-1]
    assert torch.equal(fused(tokens), plain(tokens))


def two_groups(model: nn.Module) -> list[dict]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    model.eval()  # no dropout
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        data = rows(seed=step)
        loss = model(data[:, :-1], labels=data[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare_to_torch(models: list[GPT]) -> None:
    """Four steps with each optimizer; then Apex continues with the state of torch's."""
    theirs = torch.optim.AdamW(two_groups(models[0]), **SETTINGS)
    ours = ApexAdam(find_apex(CUDA), two_groups(models[1]), **SETTINGS)
    expected = train(models[0], theirs, range(4))
    assert train(models[1], ours, range(4)) == pytest.approx(expected, rel=1e-5)
    torch_state, state = theirs.state_dict()["state"], ours.state_dict()["state"]
    assert {k: set(v) for k, v in state.items()} == {k: set(v) for k, v in torch_state.items()}
    resumed = ApexAdam(find_apex(CUDA), two_groups(models[1]), **SETTINGS)
    groups = resumed.state_dict()["param_groups"]
    resumed.load_state_dict({"state": copy.deepcopy(torch_state), "param_groups": groups})
    expected = train(models[0], theirs, range(4, 7))
    assert train(models[1], resumed, range(4, 7)) == pytest.approx(expected, rel=1e-5)


@ranks(3)
def test_adam_on_shards(tmp_path: Path) -> None:
    """Apex gets plain local parts, also where a rank has no row of a parameter."""
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    install(folder, NVIDIA)
    mesh = init_device_mesh("cpu", (3,))
    config = replace(GPT2, ffn_hidden_size=4)  # 2, 2 and 0 rows
    models = [build(config), build(config)]
    for model in models:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    compare_to_torch(models)
    sys.path.remove(str(folder))
    unload_apex()


def test_uneven_steps_raise(tmp_path: Path) -> None:
    install(tmp_path, NVIDIA)
    model = build(GPT2)
    optimizer = ApexAdam(find_apex(CUDA), model.parameters(), **SETTINGS)
    next(model.parameters()).grad = torch.ones(64, 32)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(AssertionError, match="no gradient in an earlier step"):
        optimizer.step()
