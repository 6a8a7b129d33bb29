"""FusedAdam against torch's Adam and AdamW: numbers, state, shards, checkpoints.

Set RANDOM_ADAM to draw more sequences than the suite does.
"""

import copy
import logging
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import ranks
from tests.zeropp.optim.optimizer_pair import Pair, run
from tests.zeropp.quant.packed_bytes import bits_of
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import FusedAdam, InputError, ZeroConfig, optimizer_step, shard
from zeropp.optim import adam as adam_module
from zeropp.optim.adam import fastest_adamw
from zeropp.optim.adam_op import Arrays, adam
from zeropp.optim.cpu_adam import CPUAdam

SHAPES = ((7, 5), (33,), (), (3, 4, 2, 2))
LR = 1e-2
DRAWS = int(os.environ.get("RANDOM_ADAM", "12"))


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(*several: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    """The same gradients to each of several lists; they differ in size by a million."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, alike in enumerate(zip(*several, strict=True)):
        gradient = torch.randn(alike[0].shape, generator=generator) * 10.0 ** (2 * index - 3)
        for parameter in alike:
            parameter.grad = gradient * scale


def bits_alike(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for own, torchs_own in zip(mine, theirs, strict=True):
        assert torch.equal(bits_of(own.detach()), bits_of(torchs_own.detach()))


class AdamPair(Pair):
    """FusedAdam or CPUAdam beside torch's AdamW, or Adam."""

    def drawn_settings(self) -> dict:
        betas = self.draw.choice([(0.9, 0.999), (0.8, 0.99), (0.0, 0.5)])
        decay = self.draw.choice([0.0, 0.1])
        self.kind = self.draw.choice([FusedAdam, FusedAdam, CPUAdam])
        self.decoupled = self.draw.random() < 0.7
        return {"lr": 0.02, "betas": betas, "eps": 1e-6, "weight_decay": decay}

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.kind is CPUAdam:
            return CPUAdam(parameters, **self.settings, adamw_mode=self.decoupled)
        return FusedAdam(parameters, **self.settings, adam_w_mode=self.decoupled)

    def make_peers(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return [kind(parameters, **self.settings, fused=self.draw.choice([True, None]))]

    def exchange_states(self) -> None:
        """Go on from what the other has saved."""
        (peer,) = self.peers
        saved, saved_by_torch = (copy.deepcopy(e.state_dict()) for e in (self.optimizer, peer))
        assert saved["state"].keys() == saved_by_torch["state"].keys()
        for index, state in saved["state"].items():
            other = saved_by_torch["state"][index]
            assert state.keys() == other.keys() and state["step"] == other["step"]
            assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())
        if self.kind is FusedAdam:
            names = [set(each["param_groups"][0]) for each in (saved, saved_by_torch)]
            assert names[0] == names[1]
        self.optimizer.load_state_dict(saved_by_torch)
        peer.load_state_dict(saved)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_random_calls_are_torchs(seed):
    calls = [Pair.step_by_a_factor, Pair.load_into_another, AdamPair.exchange_states]
    run(AdamPair, seed, calls)


def test_without_bias_correction_the_first_step_is_small():
    """By hand: m = 0.1 g, v = 0.001 g^2, so that the update is LR * 0.1 / sqrt(0.001)."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -2.0, 5.0])
    FusedAdam([parameter], lr=LR, bias_correction=False, weight_decay=0.0).step()
    update = LR * 0.1 / 0.001**0.5
    expected = torch.tensor([-update, update, -update])
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


def test_a_deep_copy_of_the_optimizer_continues_identically():
    mine = parameters_of()
    halves = [torch.zeros_like(parameter, dtype=torch.bfloat16) for parameter in mine]
    pairs = dict(zip(mine, halves, strict=True))
    ours = FusedAdam(mine, lr=LR, bias_correction=False, copies=pairs)
    give_gradients(mine, step=0)
    ours.step()
    again = copy.deepcopy(ours)
    for optimizer in (ours, again):
        give_gradients(optimizer.param_groups[0]["params"], step=1)
        optimizer.step()
    bits_alike(again.param_groups[0]["params"], mine)
    bits_alike(list(again.copies.values()), halves)


def test_parameters_have_their_own_step_counts(monkeypatch):
    """One of them had no gradient in every other step; those of one count share a call."""
    mine, separate = parameters_of(), parameters_of()
    optimizers = [FusedAdam([parameter], lr=LR) for parameter in separate]
    alternate(separate, optimizers)
    sizes = []

    def counting(arrays: Arrays, *others: object) -> None:
        sizes.append(len(arrays.parameters))
        adam(arrays, *others)

    monkeypatch.setattr(adam_module, "adam", counting)
    ours = FusedAdam(mine, lr=LR)
    alternate(mine, [ours])
    assert sizes == [4, 3, *(3, 1), 3, *(3, 1), 3]
    bits_alike(mine, separate)
    assert [int(ours.state[parameter]["step"]) for parameter in mine] == [6, 3, 6, 6]


def alternate(parameters: list[nn.Parameter], optimizers: list[FusedAdam]) -> None:
    """Six steps; the second parameter has no gradient in every other one."""
    for step in range(6):
        give_gradients(parameters, step=step)
        if step % 2:
            parameters[1].grad = None
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_step_of_no_finite_factor_changes_nothing_and_does_not_count(factor):
    mine = parameters_of()
    halves = {mine[0]: torch.full(SHAPES[0], 7, dtype=torch.float16)}
    ours = FusedAdam(mine, lr=LR, copies=halves)
    give_gradients(mine, step=0)
    ours.step()
    before = copy.deepcopy([[parameter, *ours.state[parameter].values()] for parameter in mine])
    half = halves[mine[0]].clone()
    ours.step(factor=torch.tensor(factor))
    ours.state_dict()
    for parameter, state_before in zip(mine, before, strict=True):
        bits_alike([parameter, *ours.state[parameter].values()], state_before)
    assert torch.equal(halves[mine[0]], half)


def test_copies_are_the_new_weights_rounded():
    mine = parameters_of()
    halves = {
        mine[0]: torch.zeros(SHAPES[0], dtype=torch.bfloat16),
        mine[2]: torch.zeros(SHAPES[2], dtype=torch.float16),
    }
    ours = FusedAdam(mine, lr=LR, copies=halves)
    give_gradients(mine, step=0)
    ours.step()
    bits_alike([mine[0].bfloat16(), mine[2].half()], list(halves.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits(dtype):
    mine, theirs = parameters_of(), parameters_of()
    for parameter in mine:
        parameter.grad_dtype = None  # any
    give_gradients(mine, theirs, step=0)
    for parameter, fp32_parameter in zip(mine, theirs, strict=True):
        parameter.grad = parameter.grad.to(dtype)
        fp32_parameter.grad = parameter.grad.float()
    for parameters in (mine, theirs):
        FusedAdam(parameters, lr=LR).step()
    bits_alike(mine, theirs)


def test_tensors_with_other_strides():
    """A convolution's weights with channels last, gradients in another order than the weights."""
    mine, theirs = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Conv2d(3, 4, 3)
    theirs.load_state_dict(mine.state_dict())
    assert not mine.weight.is_contiguous() and theirs.weight.is_contiguous()
    optimizers = [FusedAdam(model.parameters(), lr=LR) for model in (mine, theirs)]
    for step in range(3):
        gradient = torch.randn(4, 3, 3, 3)
        mine.weight.grad = gradient if step else gradient.to(memory_format=torch.channels_last)
        theirs.weight.grad = gradient.transpose(0, 2).contiguous().transpose(0, 2)
        for optimizer in optimizers:
            optimizer.step()
    bits_alike([mine.weight], [theirs.weight])


@ranks(2)
def test_shards_are_updated_like_the_full_tensor():
    """Of three rows one rank has two; of one row it has all, and the other none; the last is whole
    on both."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (1, 4), (8,))]
    shards = [
        nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, [placement]))
        for parameter, placement in zip(whole, (Shard(0), Shard(0), Replicate()), strict=True)
    ]
    plain, sharded = FusedAdam(whole, lr=LR), FusedAdam(shards, lr=LR)
    for step in range(3):
        give_gradients(whole, step=step)
        for parameter, own in zip(whole, shards, strict=True):
            own.grad = distribute_tensor(parameter.grad.clone(), mesh, own.placements)
        plain.step()
        sharded.step(factor=torch.tensor(1.0))
    local = [parameter.to_local().numel() for parameter in shards]
    assert local == ([5, 0, 8] if dist.get_rank() else [10, 4, 8])
    bits_alike([parameter.full_tensor() for parameter in shards], whole)
    moments = [sharded.state[parameter]["exp_avg"] for parameter in shards]
    assert all(isinstance(moment, DTensor) for moment in moments)
    bits_alike(
        [moment.full_tensor() for moment in moments], [plain.state[p]["exp_avg"] for p in whole]
    )
    assert all(int(sharded.state[parameter]["step"]) == 3 for parameter in shards)


@pytest.mark.parametrize("ours_saves", [True, False])
@ranks(2)
def test_distributed_checkpoints_load_into_both_optimizers(ours_saves, tmp_path):
    kinds = (FusedAdam, torch.optim.AdamW) if ours_saves else (torch.optim.AdamW, FusedAdam)
    saver, loader = (
        model_after_steps(kind, steps) for kind, steps in zip(kinds, (2, 1), strict=True)
    )
    saved = dcp_state.get_optimizer_state_dict(*saver, options=FLAT)
    dcp.save(saved, checkpoint_id=tmp_path)
    into = dcp_state.get_optimizer_state_dict(*loader, options=FLAT)
    dcp.load(into, checkpoint_id=tmp_path)
    dcp_state.set_optimizer_state_dict(*loader, into, options=FLAT)
    for saved_parameter, loaded_parameter in zip(
        saver[0].parameters(), loader[0].parameters(), strict=True
    ):
        state, restored = saver[1].state[saved_parameter], loader[1].state[loaded_parameter]
        assert state["step"] == restored["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            bits_alike([restored[name].to_local()], [state[name].to_local()])
    loader[1].step()


FLAT = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


def model_after_steps(kind: type, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = kind(model.parameters(), lr=LR)
    for step in range(steps):
        model(torch.randn(2, 5) + step).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_loss_that_is_not_finite_skips_a_step_of_a_sharded_model():
    model = small_model()
    sharding = shard(model, None, ZeroConfig())
    optimizer = FusedAdam(model.parameters(), lr=LR)
    before = copy.deepcopy(list(model.parameters()))
    loss_of(model, tokens_of(0)).backward()
    assert optimizer_step(optimizer, sharding, loss=torch.tensor(float("nan"))).skipped
    bits_alike(list(model.parameters()), before)


def test_only_fp32_weights():
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(InputError, match=r"shape \[2, 2\] is torch.bfloat16: keep the weights"):
        FusedAdam(model.parameters())
    optimizer = FusedAdam(nn.Linear(2, 2).parameters())
    with pytest.raises(InputError, match="fp32 parameters"):
        optimizer.add_param_group({"params": model.parameters()})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "options",
    [dict(lr=-1.0), dict(lr=float("nan")), dict(eps=-1e-8), dict(betas=(0.9, 1.0))]
    + [dict(betas=(-0.1, 0.9)), dict(weight_decay=-0.1), dict(weight_decay=float("inf"))],
)
def test_settings_out_of_range(options):
    with pytest.raises(InputError, match=f"FusedAdam cannot run with {next(iter(options))} = "):
        FusedAdam(nn.Linear(2, 2).parameters(), **options)


def test_a_state_with_unsupported_options():
    parameters = parameters_of()
    theirs = torch.optim.AdamW(parameters, amsgrad=True)
    with pytest.raises(InputError, match="no amsgrad; leave it out, or use torch.optim.AdamW"):
        FusedAdam(parameters).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("dtype", "built", "message"),
    [
        (torch.float32, True, "AdamW: zeropp's, one kernel to unscale, clip and update"),
        (torch.float32, False, "AdamW: PyTorch's, fused (ours is not built for this {})"),
        (torch.bfloat16, True, "AdamW: PyTorch's, fused (not all weights are fp32)"),
    ],
)
def test_fastest_adamw(dtype, built, message, device, monkeypatch, caplog):
    monkeypatch.setattr(adam_module, "kernel_for", lambda device: built or None)
    with FakeTensorMode(), caplog.at_level(logging.INFO, "zeropp"):
        groups = [{"params": [nn.Parameter(torch.empty(3, dtype=dtype, device=device))]}]
        optimizer = fastest_adamw(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert isinstance(optimizer, FusedAdam) == (dtype == torch.float32 and built)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert caplog.messages == [message.format({"cpu": "CPU", "cuda": "GPU"}[device])]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [(("cpu",), "as requested"), (("cpu", "meta"), "weights on cpu and meta; ours takes one of")],
)
def test_fastest_adamw_is_torchs_where_ours_cannot_run(devices, reason, caplog):
    with caplog.at_level(logging.INFO, "zeropp"):
        optimizer = fastest_adamw(
            [nn.Parameter(torch.empty(3, device=device)) for device in devices],
            lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, torch_on_cpu=True,
        )  # fmt: skip
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
    assert caplog.messages[0].startswith(f"AdamW: PyTorch's, fused ({reason}")
