"""ZeRO-Offload: the same losses to the last bit, with weights, gradients and moments on the host.

Where there is no GPU, device and host are one: the steps are the same but for the copies.
"""

import gc
import logging
import mmap
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import SAMPLES, config_of, run
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, LossScaler, Sharding, ZeroConfig, optimizer_step, shard
from zeropp.capabilities.offload import host_masters as module
from zeropp.capabilities.offload.host_masters import HOST, Offload
from zeropp.capabilities.offload.offloaded_adam import DelayedAdam, OffloadedAdam
from zeropp.capabilities.offload.page_locked import page_locked
from zeropp.optim import CPUAdam, FusedAdam

STEPS, WITH_LOSS_SCALE = 4, 7  # optimizer steps: the scale overflows, grows and overflows in 7
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ON_HOST = {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}}
FORMATS = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}},
}  # fmt: skip
ADAM = dict(lr=1e-2, weight_decay=0.1)


def sharded(zero: dict, settings: dict, device: str = "cpu") -> Sharding:
    per_node = min(2, dist.get_world_size())
    config = zero_config(zero, per_node, **settings)
    model = small_model().to("cpu" if config.offloads_weights else device)
    return shard(model, data_mesh(device), config)


def offloaded(sharding: Sharding, ratio: float = 1.0, device: str = "cpu") -> OffloadedAdam:
    offload = Offload(sharding, torch.device(device), ratio=ratio, pin_memory=device != "cpu")
    groups = [{"params": list(sharding.model.parameters())}]
    return OffloadedAdam(offload, groups, **ADAM)


def plain(sharding: Sharding) -> FusedAdam:
    return FusedAdam(sharding.model.parameters(), **ADAM)


def trained(
    make, zero: dict, settings: dict, steps: int | None = None, device: str = "cpu"
) -> list[float]:
    """Losses of two micro-batches a step, then norms and skips; fp16 overflows in some steps."""
    sharding = sharded(zero, settings, device)
    optimizer = make(sharding)
    overflows = sharding.compute_dtype == torch.float16
    scaler = LossScaler(scale=2.0**18, hysteresis=1, window=3) if overflows else None
    losses, norms_and_skips = [], []
    for step in range(steps or (WITH_LOSS_SCALE if overflows else STEPS)):
        mine = tokens_of(step).to(device).chunk(sharding.num_ranks)[dist.get_rank()].chunk(2)
        for index, tokens in enumerate(mine):
            with sharding.micro_step(last=index == 1):
                loss = loss_of(sharding.model, tokens)
                (loss / 2 * (scaler.scale if scaler else 1.0)).backward()
            losses.append(loss.item())
        result = optimizer_step(optimizer, sharding, clip_grad=0.5, scaler=scaler)
        norms_and_skips += [result.grad_norm, float(result.skipped)]
    assert any(norms_and_skips[1::2]) == overflows and not all(norms_and_skips[1::2])
    return losses + [
        value for value in norms_and_skips if value == value and abs(value) != float("inf")
    ]


def check(zero: dict, name: str, ratio: float = 1.0) -> None:
    """The same losses, norms and skips, to the last bit, as without offload."""
    without = {key: value for key, value in zero.items() if not key.startswith("offload")}
    expected = trained(plain, without, FORMATS[name])
    assert trained(lambda s: offloaded(s, ratio), zero, FORMATS[name]) == expected


@pytest.mark.parametrize(
    ("zero", "name", "ratio"),
    [
        ({"stage": 1}, "bf16", 1.0),
        ({"stage": 1}, "fp16", 1.0),
        ({"stage": 2}, "fp32", 1.0),
        ({"stage": 3}, "fp16", 1.0),
        ({"stage": 3}, "bf16", 0.0),
        ({"stage": 3}, "bf16", 0.4),
        (ON_HOST, "fp32", 1.0),
        (ON_HOST, "bf16", 1.0),
        (ON_HOST, "fp16", 1.0),
    ],
)
@ranks(2)
def test_offload_changes_no_loss_and_no_norm(zero, name, ratio):
    """`ratio` keeps part of the weights on the device."""
    check(zero, name, ratio)


@pytest.mark.parametrize("name", FORMATS)
@ranks(1)
def test_one_rank_with_the_weights_on_the_host_frees_them_after_use(name):
    check({"stage": 2}, name)
    check(ON_HOST, name)
    sharding = sharded(ON_HOST, FORMATS[name])
    offloaded(sharding)
    loss_of(sharding.model, tokens_of(0))
    assert all(isinstance(parameter, DTensor) for parameter in sharding.model.blocks.parameters())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@ranks(4, ranks_per_node=2)
def test_with_all_of_zeropp(name):
    """Not stuck: copies in the node follow the weights."""
    check(ALL_THREE, name)


def test_ratio_is_the_part_of_the_weights_on_the_host():
    """A GPT's embedding, which may be a third of it, is first. Here 1 stands for the host."""
    sizes = [torch.nn.Parameter(torch.empty(size)) for size in (50, 10, 30, 10)]
    for ratio, on_host in (
        (0.0, "0000"), (0.1, "0100"), (0.39, "0101"), (0.4, "0110"), (0.5, "1000"), (1.0, "1111"),
    ):  # fmt: skip
        places = module.master_devices(sizes, ratio, torch.device("meta"))
        assert "".join(str(int(place == HOST)) for place in places) == on_host


@ranks(2)
def test_weights_are_16_bit_on_the_device_and_everything_else_is_on_the_host():
    sharding = sharded({"stage": 3}, FORMATS["bf16"])
    optimizer = offloaded(sharding)
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0)).backward()
    for own, master in optimizer.masters.items():
        assert own.dtype == torch.bfloat16 and own.grad is None
        assert master.dtype == master.grad.dtype == torch.float32
    optimizer_step(optimizer, sharding)
    for own, master in optimizer.masters.items():
        assert torch.equal(own.to_local(), master.to_local().bfloat16()) and master.grad is None
        assert {"exp_avg", "exp_avg_sq", "step"} == set(optimizer.state[master])


@ranks(2)
def test_gradients_in_16_bit_are_rounded_as_they_arrive_and_as_they_are_added():
    def gradients(name: str, steps: tuple[int, ...]) -> list[torch.Tensor]:
        sharding = sharded({"stage": 2}, FORMATS["bf16"])
        offload = Offload(sharding, HOST, pin_memory=False, gradient_type=name)
        optimizer = OffloadedAdam(offload, [{"params": [*offload.masters]}], **ADAM)
        for step in steps:
            with sharding.micro_step(last=step == steps[-1]):
                loss_of(sharding.model, tokens_of(step)).backward()
        found = [each.grad.to_local().clone() for each in optimizer.masters.values()]
        assert not optimizer_step(optimizer, sharding).skipped
        return found

    both, *each = gradients("bf16", (0, 1)), gradients("fp32", (0,)), gradients("fp32", (1,))
    for total, one, other in zip(both, *each, strict=True):
        assert torch.equal(total, one.bfloat16() + other.bfloat16())  # and of that dtype


@pytest.mark.parametrize("more", [{}, {"offload_param": {"device": "cpu"}}], ids=["", "weights"])
@ranks(2)
def test_the_optimizer_writes_rounded_weights_where_fsdp_reads_them(more):
    """FSDP2 replaces shards that are not padded, or pinned, at the first pass."""
    sharding = sharded({"stage": 3, **OFFLOAD, **more}, FORMATS["bf16"])
    offload = offloaded(sharding).offload
    loss_of(sharding.model, tokens_of(0)).backward()
    for own, master in offload.masters.items():
        assert offload.copies[master].data_ptr() == own.to_local().data_ptr()


@ranks(1)
def test_gradients_are_pinned_where_the_weights_are_on_the_host_too():
    """The model computes on a GPU, to which rounded weights are copied; masters never are."""
    sharding = sharded(ON_HOST, FORMATS["bf16"])
    locked = Mock(side_effect=lambda shape, dtype: torch.empty(shape, dtype=dtype))
    with patch.object(module, "page_locked", locked):
        offload = Offload(sharding, torch.device("cuda"), ratio=1.0, pin_memory=True)
    types, count = [call.args[1] for call in locked.call_args_list], len(offload.masters)
    assert types.count(torch.float32) == types.count(torch.bfloat16) == count == len(types) / 2
    assert all(parameter.device == HOST for parameter in sharding.model.parameters())


def test_page_locked_memory_is_as_large_as_what_it_holds_and_unlocked_before_it_is_freed():
    """PyTorch's allocator would take 8 MiB for the 5 of the first."""
    locked = {}
    lock, unlock = lambda at, size, flags: locked.update({at: size}) or flags, locked.pop
    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    with patch.object(torch.cuda, "cudart", lambda: runtime), patch("torch.cuda.synchronize"):
        tensors = [
            page_locked(torch.Size(each), torch.bfloat16) for each in ((5, 2**19), (3,), [0])
        ]
        assert locked == {each.data_ptr(): each.nbytes for each in tensors[:2]}
        assert not any(address % mmap.PAGESIZE for address in locked)
        part = tensors.pop(0)[1:]
        assert len(locked) == 2 and not part.any()
        part = None
        assert [*locked] == [tensors.pop(0).data_ptr()] and not locked


@ranks(2)
def test_masters_follow_writes_to_the_weights():
    sharding = sharded({"stage": 3}, FORMATS["bf16"])
    optimizer = offloaded(sharding)
    weight = sharding.model.blocks[0].up.weight
    with zeropp.zero.GatheredParameters(weight, modifier_rank=0):
        if dist.get_rank() == 0:
            torch.nn.init.constant_(weight, 0.25)
    assert (optimizer.masters[weight].to_local() == 0.25).all()
    state = {
        name: torch.full_like(tensor, 0.5) for name, tensor in sharding.model.state_dict().items()
    }
    sharding.model.load_state_dict(state)
    assert all((master.to_local() == 0.5).all() for master in optimizer.masters.values())


@pytest.mark.parametrize(("name", "more"), [("bf16", {"delayed": True}), ("fp16", {})])
@ranks(1)
def test_masters_are_the_memory_that_was_drawn_into(name, more):
    sharding = sharded({"stage": 3}, FORMATS[name])
    drawn = {each: each.to_local().data_ptr() for each in sharding.model.parameters()}
    offload = Offload(sharding, HOST, pin_memory=False, **more)
    assert drawn == {own: each.to_local().data_ptr() for own, each in offload.masters.items()}


@ranks(1)
def test_a_model_has_one_offloaded_optimizer_which_takes_gradients_while_the_model_lives():
    sharding = sharded({"stage": 2}, FORMATS["bf16"])
    optimizer = offloaded(sharding)
    with pytest.raises(InputError, match=r"or has an offloaded optimizer, cannot.*keep it"):
        offloaded(sharding)
    masters, optimizer = optimizer.masters.values(), None
    gc.collect()
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0)).backward()
    assert all(master.grad is not None for master in masters)


@ranks(2)
def test_too_little_memory_on_one_machine_is_reported_on_all():
    """And nobody takes any before all have looked; ranks of other axes take memory, too."""
    free = 1000 if dist.get_rank() else 2**40
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = shard(small_model(), mesh, zero_config({"stage": 2}, **FORMATS["bf16"]), axis="data")
    with patch.object(module, "free_bytes", lambda: free), patch.object(Offload, "_empty") as taken:
        with pytest.raises(
            InputError, match=r"needs 0\.0 GiB of host memory for the 2 ranks.*more machines$"
        ):
            offloaded(model)
    assert not taken.called


@ranks(1)
def test_a_model_that_has_run_cannot_be_offloaded():
    sharding = sharded({"stage": 3}, FORMATS["bf16"])
    loss_of(sharding.model, tokens_of(0))
    with pytest.raises(InputError, match="before the first forward pass"):
        offloaded(sharding)


def test_pageable_memory_where_none_can_be_pinned(caplog, monkeypatch):
    sharding = shard(small_model(), None, ZeroConfig())
    refused = RuntimeError("no more of it\nwith a trace")
    monkeypatch.setattr(module, "page_locked", Mock(side_effect=refused))
    offload = Offload(sharding, HOST, ratio=1.0, pin_memory=False)
    offload._pinned = True
    with caplog.at_level(logging.WARNING, "zeropp"):
        for _ in range(2):
            assert offload._empty(torch.ones(3), HOST, torch.float32).shape == (3,)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [warning.message for warning in warnings] == [
        "offload: the system refuses page-locked memory (no more of it); the rest is pageable, "
        "so copies wait for each other and for the computation"
    ]


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_an_engine_offloads_as_its_json_says(stage, tmp_path):
    """bf16, saved with offload and without, gone on with the other; and as if never stopped."""
    bf16 = {"bf16": {"enabled": True}}
    settings = [
        config_of(**bf16) | {"zero_optimization": {"stage": stage, **more}}
        for more in ({}, {"offload_optimizer": {"device": "cpu"}})
    ]
    whole = [run(engine, 4) for engine in map(engine_of, settings)]
    assert whole[0] == pytest.approx(whole[1], rel=1e-4)  # PyTorch's Adam and ours
    for first, second in ((0, 1), (1, 0), (1, 1)):
        engine = engine_of(settings[first])
        run(engine, 2)
        folder = tmp_path / f"{first}{second}"
        engine.save_checkpoint(folder)
        again = engine_of(settings[second])
        again.load_checkpoint(folder)
        rest = run(again, 2, first=2)
        assert rest == pytest.approx(whole[second][2:], rel=1e-4)
        assert first != second or rest == whole[second][2:]


def engine_of(config: dict, **options: object) -> zeropp.Engine:
    return zeropp.initialize(model=small_model(), config=config, **options)[0]


@ranks(1)
def test_an_adam_of_ours_is_taken_over_with_its_options():
    config = {"train_batch_size": SAMPLES, "zero_optimization": {"stage": 2} | OFFLOAD}
    model = small_model()
    adam = CPUAdam(
        model.parameters(), bias_correction=False, fp32_optimizer_states=False, adamw_mode=False,
        seed=7,
    )  # fmt: skip
    engine, optimizer, *_ = zeropp.initialize(model=model, config=config, optimizer=adam)
    run(engine, 1)
    assert isinstance(optimizer, OffloadedAdam) and not optimizer.bias_correction
    assert optimizer.seed == 7 and not optimizer.defaults["decoupled_weight_decay"]
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@ranks(4, ranks_per_node=2)
def test_weights_frozen_after_their_backward_are_stepped_and_seen(delayed):
    """hpZ keeps no copy of them, whenever their update arrives."""

    def losses(zero: dict) -> list[float]:
        sharding = sharded(zero, FORMATS["fp32"])
        offload = Offload(sharding, HOST, ratio=1.0, pin_memory=False, delayed=delayed)
        groups = [{"params": list(sharding.model.parameters())}]
        kind, warmup = (DelayedAdam, {"warmup": 0}) if delayed else (OffloadedAdam, {})
        optimizer, values = kind(offload, groups, **warmup, **ADAM), []
        for step in range(3):
            with sharding.micro_step(last=True):
                loss_of(sharding.model, tokens_of(step)).backward()
            if step == 0:
                sharding.model.blocks[0].requires_grad_(False)
            optimizer_step(optimizer, sharding)
            with torch.no_grad():
                values.append(loss_of(sharding.model, tokens_of(9)).item())
        return values

    hpz = {"stage": 3, "zero_hpz_partition_size": 2}
    assert losses(hpz) == losses({"stage": 3})


@ranks(1)
def test_gradients_are_taken_also_where_nobody_holds_the_optimizer():
    """Units refer to what takes them weakly; the model's hook of loaded weights keeps that."""
    sharding = sharded({"stage": 2, **OFFLOAD}, FORMATS["bf16"])
    offloaded(sharding)
    gc.collect()
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0)).backward()
    assert all(each.grad is None for each in sharding.model.parameters())
