"""Models that `fully_shard` has sharded: attached, they train as before, and send less."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import zeropp
from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE as ZERO
from tests.zeropp.small_model import SmallModel, in_parts, loss_of, small_model, tokens_of, whole
from zeropp import InputError
from zeropp import fsdp_adapter as fsdp

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 2}}
ZEROPP = PLAIN | {"zero_optimization": ZERO}
STEPS = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(mesh: DeviceMesh | None = None, **options: object) -> SmallModel:
    """A model that its owner has sharded."""
    model = small_model()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: FSDPModule,
    *,
    steps: int = STEPS,
    micro_batches: int = 1,
    once: bool = True,
    clip: float = 0,
) -> list[float]:
    """The losses of this rank, and the weights' sums."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for number in range(steps):
        for index in range(micro_batches):
            tokens = tokens_of(7 * number + index).chunk(dist.get_world_size())[dist.get_rank()]
            model.set_requires_gradient_sync(not once or index == micro_batches - 1)
            loss = loss_of(model, tokens) / micro_batches
            loss.backward()
            losses.append(loss.item())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses + [whole(weight).double().sum().item() for weight in model.parameters()]


@ranks(4)
def test_with_all_of_zeropp_it_sends_less_and_learns_the_same():
    expected = train(sharded(), micro_batches=2)
    model = sharded()
    attached = zeropp.attach(model, ZEROPP)
    assert train(model, micro_batches=2) == pytest.approx(expected, rel=0.05, abs=0.3)
    sent, formula = attached.traffic.take(), attached.expected_traffic(2)
    assert sent == {key: STEPS * num_bytes for key, num_bytes in formula.items()}
    across = [
        sum(num_bytes for (_, hop), num_bytes in each.items() if hop == "across_nodes")
        for each in (formula, attached.plain_traffic(2))
    ]
    total = torch.tensor(across)
    dist.all_reduce(total)
    assert 3 * total[0] < total[1]
    blocks = [f"blocks.{index}" for index in range(2)]
    assert attached.skipped == {} and list(attached.units) == ["", *blocks]


@ranks(4)
def test_detached_it_is_what_it_was():
    model = sharded()
    zeropp.attach(model, ZEROPP).detach()
    assert train(model) == train(sharded())
    attached = zeropp.attach(model, ZEROPP)
    loss_of(model, tokens_of(1)).backward()
    sent = attached.traffic.sent
    attached.detach()
    loss_of(model, tokens_of(1)).backward()
    assert attached.traffic.sent == sent and attached.kept.nbytes == 0


@ranks(2)
def test_more_ranks_per_node_than_ranks_are_one_node():
    attached = zeropp.attach(sharded(), ZEROPP | {"zeropp": {"ranks_per_node": 16}})
    assert attached.describe()[0] == ("nodes", "1 of 2 ranks")
    assert not attached.plan.axis.weights.keeps


@ranks(2)
def test_the_forecast_knows_roots_inside_other_modules_and_parts_of_models():
    one_node = PLAIN | {"zeropp": {"ranks_per_node": 2}}
    model, other = sharded(), sharded()
    loss_of(other, tokens_of(0)).backward()  # so that FSDP2 has decided which unit is the root
    for sharded_model, part in ((model, nn.Sequential(model)), (other, other.blocks[0])):
        attached = zeropp.attach(part, one_node)
        loss_of(sharded_model, tokens_of(1)).backward()
        assert attached.traffic.take() == attached.expected_traffic()


@ranks(4)
def test_exact_weights_for_others():
    model = sharded()
    exact = [weight.full_tensor().clone() for weight in model.parameters()]
    attached = zeropp.attach(model, ZEROPP)

    def gathered() -> list[torch.Tensor]:
        for unit in attached.units.values():
            unit.unshard()
        return [weight.detach().clone() for weight in model.parameters()]

    with attached.exact_weights():
        for weight, other in zip(gathered(), exact, strict=True):
            assert torch.equal(weight, other)
    rounded = gathered()
    assert any(not torch.equal(*pair) for pair in zip(rounded, exact, strict=True))


@ranks(4)
def test_what_cannot_be_attached_is_named():
    def refused(model: nn.Module, config: dict, message: str) -> None:
        before = [module.forward for module in model.modules()]
        with pytest.raises(InputError, match=message):
            zeropp.attach(model, config)
        assert before == [module.forward for module in model.modules()]

    refused(small_model(), ZEROPP, "SmallModel has no unit of fully_shard")
    model = sharded()
    refused(model, {"zero_optimization": {"stage": 0}}, "stage = 0 keeps whole weights")
    refused(model, {"zero_optimization": ZERO | {"zero_hpz_partition_size": 3}}, "does not divide")
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    refused(model, {"zero_optimization": offload}, "offload_optimizer changes where")
    alone = {"zeropp": {"sync_every": 9}, "zero_optimization": ZERO}
    refused(model, alone, "sync_every = 9: all ranks of zeropp.attach take each step together")
    refused(model, {"zeropp": {"ranks_per_node": 3}, "zero_optimization": ZERO}, "ranks_per_node")
    zeropp.attach(model, ZEROPP)
    refused(model, ZEROPP, "the model has ZeRO\\+\\+'s collectives already")
    mesh = init_device_mesh("cpu", (4,))
    sharding = zeropp.shard(small_model(), mesh, zeropp.ZeroConfig.from_json(ZEROPP))
    refused(sharding.model, ZEROPP, "collectives already, by zeropp.shard")
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mixed = small_model()
    fully_shard(mixed.blocks[0], mesh=pairs["a"])
    fully_shard(mixed, mesh=pairs["b"])
    own = dist.get_rank()
    meshes = str(sorted((own, own ^ 1))), str(sorted((own, own ^ 2)))
    message = "the model is sharded over the ranks {} and blocks.0 over {}, which are not among"
    refused(mixed, ZEROPP, re.escape(message.format(*meshes)))


@ranks(4)
def test_a_mistake_of_one_rank_is_an_error_on_all():
    model, is_wrong = sharded(), dist.get_rank() == 2
    parallel = sharded_in_parts(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
    other = {"zero_optimization": ZERO | {"zero_hpz_partition_size": 1}}
    for wrong, message in (
        ("no_such.json", "cannot read the configuration no_such.json"),
        (
            {"zero_optimization": ZERO | {"zero_hpz_partition_size": 3}},
            "_size = 3 (does|counts)",
        ),
        (ZEROPP | other, "zero_hpz_partition_size is 2 on rank 0 and 1 on rank 2: give all ranks"),
        (ZEROPP | {"zeropp": {"ranks_per_node": 1}}, "ranks_per_node is 2 on rank 0 and 1 on"),
        (ZEROPP | {"communication_data_type": "bf16"}, "communication_data_type is None on rank 0"),
    ):
        for each in (model, parallel):
            with pytest.raises(InputError, match=message):
                zeropp.attach(each, wrong if is_wrong else ZEROPP)
    skips = sharded()
    if is_wrong:
        skips.blocks[1].set_custom_all_gather(type("Own", (), {"allocate": None})())
    with pytest.raises(InputError, match=r"units is \['', .* on rank 2"):
        zeropp.attach(skips, ZEROPP)
    assert train(model) == train(sharded())  # nothing was changed
    zeropp.attach(parallel, PLAIN)


@pytest.mark.parametrize("is_whole", [False, True], ids=["attach", "shard"])
@ranks(2)
def test_ranks_with_other_models_are_told_what_differs(is_whole):
    """They would send buffers of other sizes, which ends a process of gloo without a word."""

    def use(model: SmallModel, policy: MixedPrecisionPolicy) -> None:
        config = {"zero_optimization": ZERO, "zeropp": {"ranks_per_node": 1}}
        if is_whole:
            mesh = init_device_mesh("cpu", (2,))
            zeropp.shard(model, mesh, zeropp.ZeroConfig.from_json(config))
        else:
            for unit in (*model.blocks, model):
                fully_shard(unit, mp_policy=policy)
            zeropp.attach(model, config)

    is_other, none = dist.get_rank() == 1, MixedPrecisionPolicy()
    frozen, longer, deeper, half = small_model(), small_model(), small_model(), small_model()
    frozen.blocks[0].up.requires_grad_(not is_other)
    if is_other:
        longer.blocks[1].up.bias = nn.Parameter(torch.zeros(99))
        deeper.blocks[1].extra = nn.Linear(3, 3)
        half.blocks[1].up.to(torch.bfloat16)
    told = {
        r"blocks.0.up.weight is \[.*\] torch.float32 trained on rank 0 and \[.*frozen on": frozen,
        r"blocks.1.up.bias is \[.*\] torch.float32 trained on rank 0 and \[99\] torch": longer,
        "blocks.1.extra.weight is absent on rank 0 and": deeper,
        r"blocks.1.*torch.bfloat16.* on rank 1": half,
    }
    for message, model in told.items():
        with pytest.raises(InputError, match=message):
            use(model, none)
    if not is_whole:
        with pytest.raises(InputError, match=r"the model gathers weights is torch.float32 on rank"):
            use(small_model(), BF16 if is_other else none)
    use(small_model(), none)
    with pytest.raises(InputError, match="was given a list: give the model"):
        zeropp.shard([], init_device_mesh("cpu", (2,)), None) if is_whole else zeropp.attach([], {})


def sharded_in_parts(mesh: DeviceMesh) -> SmallModel:
    """A model whose blocks are in tensor-parallel parts, sharded along the other axis."""
    model = in_parts(mesh)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh["data"])
    return model


@ranks(2)
def test_types_that_cannot_be_sent_are_named_on_all_ranks():
    mesh = init_device_mesh("cpu", (2,))
    models = [small_model().double() for _ in range(2)]
    for model, policy in zip(models, (MixedPrecisionPolicy(), BF16), strict=True):
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    with pytest.raises(InputError, match="the model gathers weights in torch.float64, and bf16"):
        zeropp.attach(models[0], {"zero_optimization": ZERO, "zeropp": {"ranks_per_node": 1}})
    zeropp.attach(models[1], {"zero_optimization": ZERO, "zeropp": {"ranks_per_node": 1}})
    for model in models:
        loss_of(model, tokens_of(1)).backward()


@ranks(2)
def test_the_owner_s_prefetching_is_left_as_it_is():
    for direction in ("forward", "backward"):
        model = sharded()
        first, last = model.blocks
        getattr(last, f"set_modules_to_{direction}_prefetch")([first])
        zeropp.attach(model, PLAIN | {"zeropp": {"ranks_per_node": 1}})
        set_ahead = [fsdp.prefetches(unit) for unit in (model, *model.blocks)]
        assert set_ahead == [False, False, True]


@ranks(4)
def test_units_with_other_collectives_keep_them():
    model = sharded()
    own = model.blocks[1]
    own.set_custom_all_gather(type("Own", (), {"allocate": None, "__call__": None})())
    attached = zeropp.attach(model, ZEROPP)
    assert list(attached.skipped) == ["blocks.1"] and "blocks.1" not in attached.units


class Branch(nn.Module):
    """The gradients of `first` are 0, if it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: torch.Tensor, uses_first: bool) -> torch.Tensor:
        return self.last(self.first(x) if uses_first else x)


@ranks(4)
def test_replicas_agree():
    """Replicas that differ are refused. A parameter that one of them has used, with gradients of 0,
    is stepped on all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    is_second = dist.get_rank() >= 2
    other = ZEROPP | {"zero_optimization": ZERO | {"zero_quantized_gradients": False}}
    with pytest.raises(InputError, match=r"_gradients is True on rank \d and False on rank \d"):
        zeropp.attach(sharded(mesh), other if is_second else ZEROPP)
    frozen = small_model()
    frozen.blocks[0].up.requires_grad_(not is_second)
    with pytest.raises(InputError, match=r"up.weight is .* trained on rank \d and .* frozen on"):
        zeropp.attach(fully_shard(frozen, mesh=mesh), PLAIN)
    model = fully_shard(Branch(), mesh=mesh)
    zeropp.attach(model, PLAIN)
    model(torch.ones(2, 4), not is_second).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
