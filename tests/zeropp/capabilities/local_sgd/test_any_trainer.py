"""Local steps under any trainer: plain DiLoCo's weights, exact stops, nodes alike to the bit.

Set RANDOM_LOCAL_STEPS to draw more runs than the suite does.
"""

import os
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeropp
from tests.ranks import ranks
from tests.zeropp.capabilities.local_sgd.diloco import Recipe, diloco
from tests.zeropp.capabilities.local_sgd.trained_node import (
    CLOSE,
    STEPS,
    Node,
    adamw,
    count_tokens,
    fused,
    model_with_buffers,
    muon,
    sgd,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of

RUNS = int(os.environ.get("RANDOM_LOCAL_STEPS", "6"))


def drawn(seed: int) -> tuple[str, Callable, Recipe, DeviceMesh | None]:
    """How a model is sharded, its optimizer, how nodes exchange, and their ranks."""
    draw = random.Random(seed)
    kind = ["alone", "fsdp", "kept", "attached", "stage0", "stage1", "stage3"][seed % 7]
    every = draw.choice([2, 3, 5])
    recipe = Recipe(
        every=every,
        momentum=draw.choice([0.0, 0.5, 0.9]),
        fragments=draw.choice([1, 2, 4, 30]),
        delay=draw.choice([0, 1, every - 1]),
        mixing=draw.choice([0.0, 0.5]),
    )
    mesh = None
    if kind != "alone":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return kind, draw.choice([adamw, fused, sgd, muon]), recipe, mesh


@ranks(4, timeout=200)
def test_nodes_train_as_plain_diloco_does() -> None:
    for seed in range(RUNS):
        kind, build, recipe, mesh = drawn(seed)
        node = Node(kind, build, recipe.zeropp(32), mesh)
        nodes = node.steps.local.group.size
        models = [model_with_buffers() for _ in range(nodes)]
        place, size = (mesh.get_local_rank(1), mesh.size(1)) if mesh else (0, 1)
        optimizers = [build(model) for model in models]

        def train(
            number: int,
            step: int,
            models=models,
            optimizers=optimizers,
            part: tuple[int, int] = (size, place),
        ) -> None:
            own = tokens_of(step).chunk(len(models))[number]
            count_tokens(models[number], own.chunk(part[0])[part[1]])
            loss_of(models[number], own).backward()
            optimizers[number].step()
            optimizers[number].zero_grad()

        cut = [[] for _ in range(recipe.fragments)]
        for each in node.steps.local.fragments:
            cut[each.number] = [*each.weights.named]
        diloco(models, train, STEPS, recipe, cut)
        node.train(1, STEPS)
        expected = models[node.number].state_dict()
        for name, own in node.state().items():  # buffers are sums of 40 or less: their rounding
            rtol = 1e-6 if name in ("usual", "passes") else 0
            assert torch.allclose(own, expected[name], rtol=rtol, atol=CLOSE), (seed, kind, name)
        node.steps.close()


@ranks(4, timeout=200)
def test_a_stop_loses_no_digit() -> None:
    for seed in range(RUNS):
        kind, build, recipe, mesh = drawn(seed)
        section = recipe.zeropp([2, 4, 8][seed % 3])
        node = Node(kind, build, section, mesh)
        stop = random.Random(seed).randint(1, STEPS - 1)
        node.train(1, stop)
        saved = node.save()
        node.train(stop + 1, STEPS)
        other = Node(kind, build, section, mesh)
        other.load(saved)
        other.train(stop + 1, STEPS)
        for name, each in node.state().items():
            assert torch.equal(each, other.state()[name]), (seed, kind, name)
        for each in (node, other):
            each.steps.close()


@ranks(4, timeout=200)
@pytest.mark.parametrize("bits", [2, 4])
def test_nodes_are_alike_after_an_exchange(bits: int) -> None:
    kind, build, _, mesh = drawn(1)
    node = Node(kind, build, Recipe(every=2).zeropp(bits), mesh)
    for step in range(1, 5):
        node.train(step, step)
        contents = [each.numpy().tobytes() for each in node.state().values()]
        every = node.steps.local.group.gather(contents)
        assert (every[0] == every[1]) == (step % 2 == 0)
    node.steps.close()


@ranks(2)
def test_agreed_weights_are_alike_and_the_end_is() -> None:
    node = Node("alone", sgd, Recipe(every=4, fragments=2, delay=1).zeropp(4), None)
    local = node.steps.local
    for step in range(1, 8):
        node.train(step, step)
        for each in local.fragments:
            each.receive()
        agreed = [each.numpy().tobytes() for part in local.fragments for each in part.agreed]
        agreed += [each.numpy().tobytes() for each in local.buffers.state().values()]
        assert local.group.gather(agreed)[0] == agreed
    node.steps.skip_step()
    node.steps.sync()
    assert node.steps.count == 8
    contents = [each.numpy().tobytes() for each in node.state().values()]
    assert local.group.gather(contents)[0] == contents
    node.steps.close()


@ranks(2)
def test_a_run_goes_on_with_other_settings() -> None:
    """Another cut of the weights while some are exchanged; not averaged gradients."""
    before = Node("alone", sgd, Recipe(every=4, fragments=4, delay=2).zeropp(32), None)
    before.train(1, 3)
    in_flight = [each.number for each in before.steps.local.fragments if each.merges_at]
    assert in_flight == [1, 2]
    saved = before.save()
    others = Node("alone", sgd, Recipe(every=3, fragments=1).zeropp(32), None)
    own = {name: each for name, each in before.weights().items()}
    others.load(saved)
    (whole,) = others.steps.local.fragments
    for (name, now), agreed in zip(others.weights().items(), whole.agreed, strict=True):
        mixed = next(each for each in before.steps.local.fragments if name in each.weights.named)
        share = 0.5 if mixed.number in in_flight else 1.0
        expected = own[name] * share + agreed.view_as(now) * (1 - share)
        assert torch.allclose(now, expected, atol=CLOSE), name
    averaged = Node("alone", sgd, {"sync_every": 1, "sync_bits": 32}, None)
    averaged.load(saved)
    with pytest.raises(zeropp.InputError, match="trained independently before it"):
        averaged.train(4, 4)
    before.steps.local.end_delay()
    assert not any(each.merges_at for each in before.steps.local.fragments)
    alike = Node("alone", sgd, Recipe(every=2).zeropp(32), None)
    alike.train(1, 2)
    assert alike.steps.local.is_alike  # but not the moments
    averaged.load(alike.save())
    with pytest.raises(zeropp.InputError, match="trained independently before it"):
        averaged.train(3, 3)
    for each in (before, others, averaged, alike):
        each.steps.close()


@ranks(4)
@pytest.mark.parametrize("build", [fused, adamw])
def test_nodes_that_clip_by_their_own_norms_average_what_is_clipped(build: Callable) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    section = {"sync_every": {"0": 1, "9": 2}, "sync_bits": 32}
    node = Node("stage3", build, section, mesh)
    scales = [100.0, 1.0]  # of the loss of the second node
    if build is fused:  # which is called where a step is to be skipped
        scales += [float("nan"), 1.0]
    for scale in scales:
        before = node.weights()
        with node.sharding.micro_step(last=True):
            loss = loss_of(node.model, tokens_of(node.number).chunk(2)[mesh.get_local_rank(1)])
            (loss * (scale if node.number else 1.0)).backward()
        zeropp.optimizer_step(node.optimizer, node.sharding, clip_grad=0.1)
        after = node.weights()
        assert all(each.isfinite().all() for each in after.values())
        moved = [not torch.equal(before[name], after[name]) for name in before]
        assert all(moved) if scale == scale else not any(moved)
        contents = [each.numpy().tobytes() for each in after.values()]
        assert node.steps.local.group.gather(contents)[0] == contents
    with pytest.raises(zeropp.InputError, match="skip_step"):
        node.steps.skip_step()
    node.steps.close()


@ranks(2)
def test_gradients_that_are_averaged_first_are_clipped_as_in_data_parallelism() -> None:
    node = Node("alone", sgd, {"sync_every": {"0": 1, "9": 2}, "sync_bits": 32}, None)
    alone = small_model()
    optimizer = sgd(alone)
    for step in range(1, 4):
        loss_of(node.model, tokens_of(step).chunk(2)[node.number]).backward()
        loss_of(alone, tokens_of(step)).backward()
        for _ in range(2):  # a second call does nothing
            node.steps.average_gradients()
        for model, each in ((node.model, node.optimizer), (alone, optimizer)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            each.step()
            each.zero_grad()
    for own, expected in zip(node.model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(own, expected, rtol=0, atol=CLOSE)
    with pytest.raises(zeropp.InputError, match="a closure forms them in it"):
        node.optimizer.step(lambda: loss_of(node.model, tokens_of(4)))
    node.optimizer.found_inf = torch.zeros(())  # as GradScaler sets it for fused optimizers
    with pytest.raises(zeropp.InputError, match="GradScaler has a scale of each"):
        node.train(4, 4)
    for _ in range(2):
        node.steps.close()


@ranks(2)
def test_a_gradient_that_a_node_lacks_counts_as_zeros() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    settings = {"sync_every": {"0": 1, "9": 2}, "sync_bits": 32}
    steps = zeropp.local_steps(model, optimizer, {"zeropp": settings})
    before = [each.detach().clone() for each in model.parameters()]
    output = model[0](torch.ones(2, 4))
    (output if dist.get_rank() else model[1](output)).sum().backward()
    optimizer.step()
    after = [each.detach().clone() for each in model.parameters()]
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert moved == [True, True, True, True, False, False]  # the last one has no gradient at all
    contents = [each.numpy().tobytes() for each in after]
    assert steps.local.group.gather(contents)[0] == contents
    steps.close()


@ranks(4)
def test_models_over_several_nodes_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    settings = {"zeropp": {"sync_every": 2}}

    def error_of(model: nn.Module, mesh: DeviceMesh | None) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(zeropp.InputError) as caught:
            zeropp.local_steps(model, optimizer, settings, mesh)
        return str(caught.value)

    hybrid = small_model()
    fully_shard(hybrid, mesh=mesh)
    assert "embedding.weight is spread over the ranks 0, 1, 2, 3" in error_of(hybrid, mesh)
    parallel = error_of(DistributedDataParallel(small_model()), mesh)
    assert "the model is a DistributedDataParallel over several nodes" in parallel
    one = init_device_mesh("cpu", (1, 4))
    assert "there is only one node" in error_of(small_model(), one)
    assert "3 axes" in error_of(small_model(), init_device_mesh("cpu", (2, 2, 1)))
    torch.manual_seed(dist.get_rank())
    assert "differ in weight, bias" in error_of(nn.Linear(2, 2), None)
