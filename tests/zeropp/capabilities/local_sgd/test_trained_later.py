"""Local steps of parameters that are trained later, and states of other nodes or parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.capabilities.local_sgd.diloco import Recipe, diloco
from tests.zeropp.capabilities.local_sgd.trained_node import CLOSE, STEPS, Node, sgd
from tests.zeropp.small_model import loss_of, small_model, tokens_of


def set_trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Freeze a block but for the steps from 2 to 5; train another parameter from step 5 on."""
    for each in model.blocks[0].parameters():
        each.requires_grad_(2 <= step <= 5)
    added = model.blocks[1].up.weight
    added.requires_grad_(step >= 5)
    if step == 5:
        optimizer.add_param_group({"params": [added]})


def partly_trained(model: nn.Module) -> torch.optim.Optimizer:
    added = model.blocks[1].up.weight
    return torch.optim.SGD([each for each in model.parameters() if each is not added], lr=0.1)


def partial_node() -> Node:
    node = Node("alone", partly_trained, Recipe(momentum=0.9).zeropp(32), None, set_trained)
    assert "blocks.0.up.weight" not in node.steps.local.weights.named
    return node


@ranks(2)
def test_what_is_unfrozen_frozen_or_added_later_is_exchanged() -> None:
    """As in plain DiLoCo, to which frozen weights are weights that do not change."""
    models = [small_model() for _ in range(2)]
    optimizers = [partly_trained(model) for model in models]

    def train(number: int, step: int) -> None:
        set_trained(models[number], optimizers[number], step)
        loss_of(models[number], tokens_of(step).chunk(2)[number]).backward()
        optimizers[number].step()
        optimizers[number].zero_grad()

    diloco(models, train, STEPS + 1, Recipe(momentum=0.9), [[*dict(models[0].named_parameters())]])
    node, other = partial_node(), partial_node()
    node.train(1, 4)
    saved = node.save()
    node.train(5, STEPS + 1)
    expected = dict(models[node.number].named_parameters())
    for name, own in node.weights().items():
        assert torch.allclose(own, expected[name], rtol=0, atol=CLOSE), name
    other.load(saved)  # into one whose block is frozen still
    other.train(5, STEPS + 1)
    assert all(map(torch.equal, node.weights().values(), other.weights().values()))
    for each in (node, other):
        each.steps.close()


@ranks(2)
def test_nodes_that_exchange_something_else_are_named() -> None:
    def error_of(node: Node, first: int) -> str:
        with pytest.raises(zeropp.InputError) as caught:
            node.train(first, first + 2)
        return str(caught.value)

    unfrozen, added, skipped = (partial_node() for _ in range(3))
    unfrozen.prepare = lambda model, *_: model.blocks[0].requires_grad_(dist.get_rank() == 0)
    assert "exchange other parameters, other values" in error_of(unfrozen, 1)
    added.model.extra = nn.Linear(2, 2)  # with random weights
    torch.manual_seed(dist.get_rank())
    added.model.extra.reset_parameters()
    added.optimizer.add_param_group({"params": [*added.model.extra.parameters()]})
    assert "exchange other parameters, other values" in error_of(added, 1)
    skipped.train(1, 1 + dist.get_rank())
    with pytest.raises(zeropp.InputError, match="after other steps"):
        skipped.steps.sync()
    foreign = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(foreign.parameters(), lr=1.0)
    with pytest.raises(zeropp.InputError, match=r"lacks, of the shapes \(3, 2\), \(3,\): give"):
        zeropp.local_steps(nn.Linear(2, 2), optimizer, {"zeropp": {"sync_every": 2}})


@ranks(2)
def test_a_state_of_another_node_or_other_settings_is_refused() -> None:
    node, other = (Node("alone", sgd, Recipe().zeropp(bits), None) for bits in (4, 2))
    fewer = partial_node()
    own = node.steps.state_dict()
    of_first, later = node.steps.local.group.gather(own)[0], own | {"count": 3 + node.number}
    for steps, state, problem in (
        (other.steps, own, "another zeropp.sync_bits"),
        (node.steps, of_first, "on node 1: .*: node is 0 instead of 1"),
        (node.steps, own | {"nodes": 3}, "nodes is 3 instead of 2"),
        (node.steps, later, "on node 1: .*: count is 4 instead of 3"),
        (node.steps, fewer.steps.state_dict(), "blocks.0.* is absent instead of"),
    ):
        with pytest.raises(zeropp.InputError, match=problem):
            steps.load_state_dict(state)
    for each in (node, other, fewer):
        each.steps.close()


def statistics(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Let a module have a mask at first, and later others in its place."""
    if step == 1:
        model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    if step == 3:
        model.later = nn.BatchNorm1d(2)
        model.later.running_mean += dist.get_rank()
    if step == 6:
        del model.mask


@ranks(2)
def test_buffers_that_modules_get_later_are_averaged() -> None:
    """A mask with infinities stays, and what a module has lost is forgotten."""
    recipe = Recipe(every=3, fragments=2, delay=1)
    node, other = (Node("alone", sgd, recipe.zeropp(4), None, statistics) for _ in range(2))
    node.train(1, 5)
    assert node.model.mask.equal(torch.full((2, 2), -torch.inf).triu(1))
    saved, cut = node.save(), other.steps.local.fragments
    statistics(other.model, other.optimizer, 3)
    other.load(saved)
    assert other.steps.local.fragments is cut  # the names of buffers are none of parameters
    for each in (node, other):
        each.train(6, STEPS)
        each.steps.sync()
    every = node.steps.local.group.gather([*node.state().values(), *other.state().values()])
    assert all(map(torch.equal, *every))
    assert node.model.later.running_mean.equal(torch.full((2,), 0.5))
    assert all(map(torch.equal, node.state().values(), other.state().values()))
    for each in (node, other):
        each.steps.close()


@ranks(2)
def test_nodes_that_begin_with_other_buffers_are_named() -> None:
    def differ(model: nn.Module, *_: object) -> None:
        model.usual += dist.get_rank()
        if dist.get_rank() == 0:
            model.register_buffer("only", torch.zeros(2))

    with pytest.raises(zeropp.InputError, match="differ in (usual, only|only, usual): give all"):
        Node("alone", sgd, Recipe().zeropp(4), None, differ)


@ranks(2)
@pytest.mark.parametrize("bits", [2, 4, 8, 32])
def test_weights_that_are_not_finite_are_an_error_on_all_nodes(bits: int) -> None:
    node = Node("alone", sgd, Recipe(every=2).zeropp(bits), None)
    node.train(1, 2)
    with torch.no_grad():
        node.model.blocks[0].up.weight[1, 2] /= node.number - 1  # 0 on one node
    whose = "this" if node.number else "another"
    with pytest.raises(zeropp.InputError, match=f"weights of {whose} node are not finite"):
        node.train(3, 4)
    assert all(each.isfinite().all() for each in node.steps.local.fragments[0].agreed)
    node.steps.close()
