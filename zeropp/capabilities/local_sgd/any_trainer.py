"""Local SGD under any trainer: hooks that run before and after each step of its optimizer."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zeropp.capabilities.local_sgd.fragment import OUTER
from zeropp.capabilities.local_sgd.local_steps import LocalSteps
from zeropp.capabilities.local_sgd.outer_group import OuterGroup
from zeropp.capabilities.local_sgd.trained_weights import OfModule, TrainedWeights
from zeropp.errors import InputError, first_few
from zeropp.optim.step_or_skip import own_gradients
from zeropp.ranks.groups import store_of, time_limit
from zeropp.settings.zero_config import ZeroConfig

CALLER = "zeropp.local_steps"
MOMENTUM = ".momentum"  # that buffers do not have
NO_LIMIT = timedelta(minutes=30)  # of PyTorch's gloo, where the default group's backend has none


def local_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ZeroConfig | Mapping | str | Path,
    mesh: DeviceMesh | None = None,
) -> "NodeSteps":
    """Train each replica independently and synchronize every `sync_every` steps (DiLoCo).

    All ranks call it before the first step; the trainer then calls `optimizer.step()` as before.
    Each node holds a replica, whose weights are the same on all nodes at the beginning, and reads
    its own samples. Outer steps use gloo, beside the default process group.

    Args:
        model: This node's model: sharded over the node's ranks by `fully_shard` or `zeropp.shard`,
            the same on all of them, or on one rank.
        optimizer: That of the model's parameters, whose steps are counted. Parameters that are
            unfrozen, or added to both, later are synchronized from then on.
        config: A `ZeroConfig`, or DeepSpeed's JSON as a file, a text or a mapping. Only
            `zeropp.sync_every` and the other keys of local SGD have an effect.
        mesh: Its first axis is that of the nodes, and its second one, if it has one, that of the
            ranks of a node, as of HSDP. None: each rank is a node.

    Returns:
        What counts the steps, with what checkpoints need, and `sync` for the end of training.

    Raises:
        InputError: For one node, a mesh of more axes, a model that is sharded or averages gradients
            over several nodes, an optimizer of parameters that the model lacks, and nodes that
            begin with other weights or settings.

    Example:
        ```python
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("n", "r"))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["r"])  # over the ranks of a node alone
        optimizer = zeropp.FusedAdam(model.parameters(), lr=1e-3)
        settings = {"zeropp": {"sync_every": 30}}
        steps = zeropp.local_steps(model, optimizer, settings, mesh)
        model(inputs).sum().backward()
        optimizer.step()
        steps.sync()
        steps.close()
        ```
    """
    if not isinstance(config, ZeroConfig):
        config = ZeroConfig.from_json(config)
    nodes = _group_of_nodes(mesh)
    _require_within_node(model, nodes)
    group = None
    if mesh is not None and mesh.ndim == 2 and mesh.size(1) > 1:
        group = mesh.get_group(1)
    weights = TrainedWeights(model=OfModule(model, group), optimizer=optimizer)
    local = LocalSteps.of(config.zeropp, _of_all(optimizer, weights), _connect(nodes))
    _require_same_start(local)
    return NodeSteps(local, optimizer)


@dataclass
class NodeSteps:
    """The steps of this replica, `count` of them up to now.

    Replicas have different weights and optimizer states, so each saves its own, together with this
    `state_dict`. An outer step waits for the slowest replica.
    """

    local: LocalSteps
    optimizer: torch.optim.Optimizer
    count: int = field(init=False, default=0)
    averaged: int = field(init=False, default=0)
    hooks: list[RemovableHandle] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]

    def skip_step(self) -> None:
        """Count a step in which the trainer does not call the optimizer, as after an overflow.

        Nodes count alike then, although only some of them skip the step. Raises InputError for a
        step whose gradients they average, as the others would wait for those of this node.
        """
        if self._averages:
            raise InputError(
                f"skip_step of {CALLER}: zeropp.sync_every = 1 in step {self.count + 1} averages "
                "gradients, and all nodes take it: call optimizer.step(), or begin with a "
                "longer interval"
            )
        self.count += 1
        self.local.after_update(self.count)

    def average_gradients(self) -> None:
        """Average the gradients of the next step over nodes, if `sync_every` is 1 in it.

        `optimizer.step()` does it otherwise. Before clipping, the norm is that of the mean then, as
        in data parallelism, and not each node's own. All ranks call it, or none.
        """
        if self.averaged == self.count + 1:
            return
        self.averaged = self.count + 1
        self._exchange_new()
        self.local.before_update(self.averaged)

    def sync(self) -> None:
        """Give all replicas the same weights, as at the end of training; all ranks call it.

        Replicas must have taken the same number of steps.
        """
        self.local.synchronize(self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this node needs; its tensors are sharded as the weights are.

        Waits for exchanges that run. All ranks of a node call it.
        """
        group = self.local.group
        return {"count": self.count, "node": group.node, "nodes": group.size, **self.local.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, after the model's weights have been loaded.

        All nodes call it. Steps are then those of a node that was not stopped, to the last digit.
        What is frozen here and was trained before is exchanged as it was. Raises InputError on all
        nodes for a state of another node, of other parameters or settings, or of other steps.
        """
        named = (key.removeprefix(OUTER) for key in state if key.endswith(MOMENTUM))
        self._exchange_new({name.removesuffix(MOMENTUM) for name in named})
        self.local.buffers.agree()  # with those that modules have got since
        own, given, gather = _facts(self.state_dict()), _facts(state), self.local.group.gather
        own["count"] = gather(given.get("count"))[0]
        problems = [
            f"{name} is {given.get(name, 'absent')} instead of {own.get(name, 'absent')}"
            for name in {**own, **given}
            if given.get(name) != own.get(name)
        ]
        for node, found in enumerate(gather(problems)):
            if found:
                raise InputError(
                    f"load_state_dict of {CALLER} on node {node}: the state is of another node or "
                    "model, of other trained parameters, or of another zeropp.sync_bits or "
                    f"sync_feedback: {first_few(found)}. Give each node its own, of the same step; "
                    "without one the outer momentum is reset"
                )
        self.count, self.averaged = state["count"], 0
        self.local.load(state)

    def close(self) -> None:
        """Take no further part in exchanges; all ranks call it."""
        for each in self.hooks:
            each.remove()
        self.local.group.close()

    @property
    def _averages(self) -> bool:
        return self.local.schedule.averages_gradients(self.count + 1)

    def _exchange_new(self, names: Collection[str] = ()) -> None:
        """Exchange what the optimizer trains since the last step, too, and what has these names."""
        weights = self.local.weights
        if {*names} - {*weights.named} or _not_exchanged(self.optimizer, weights):
            model = replace(weights.model, known={*weights.named, *names})
            self.local.exchange_also(_of_all(self.optimizer, replace(weights, model=model)))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple:
        """Average the gradients if that is due; as this node multiplies them, for clipping."""
        has_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
        if self._averages and (has_closure or getattr(optimizer, "found_inf", None) is not None):
            raise InputError(
                f"{CALLER}: zeropp.sync_every = 1 in step {self.count + 1} averages gradients "
                "before it, and a closure forms them in it, while a GradScaler has a scale of "
                "each node's own: leave these out, or begin with a longer interval"
            )
        factor = kwargs.get("factor")
        is_clipped = factor is not None and self._averages and self.averaged != self.count + 1
        if is_clipped:
            for _, part in own_gradients(optimizer):
                part.mul_(factor)
        self.average_gradients()
        if is_clipped:  # by now; a node whose factor is not finite lets all skip the step
            firsts = [part.view(-1)[0] for _, part in own_gradients(optimizer)]
            kwargs = {**kwargs, "factor": torch.ones_like(factor) + 0 * sum(firsts)}
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        self.count += 1
        self.local.after_update(self.count)


def _group_of_nodes(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the ranks with the place of this one in all nodes."""
    if not dist.is_initialized():
        raise InputError(f"{CALLER}: no process group: call init_process_group before it")
    if mesh is not None and mesh.ndim > 2:
        raise InputError(
            f"mesh= of {CALLER} has {mesh.ndim} axes: give a part of two, as "
            'mesh["replicate", "shard"], the first one that of the nodes'
        )
    group = dist.group.WORLD if mesh is None else mesh.get_group(0)
    if group.size() == 1:
        raise InputError(
            f"{CALLER}: there is only one node, and nodes exchange with others: start several, or "
            "give a mesh whose first axis is that of the nodes"
        )
    return group


def _require_within_node(model: nn.Module, nodes: dist.ProcessGroup) -> None:
    """Raise InputError if a model is spread over nodes, or sums gradients with them."""
    others = {*dist.get_process_group_ranks(nodes)} - {dist.get_rank()}
    for name, module in model.named_modules():
        if not isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            continue
        if others.intersection(dist.get_process_group_ranks(module.process_group)):
            raise InputError(
                f"{CALLER}: {name or 'the model'} is a {type(module).__name__} over several nodes, "
                "which send each other gradients in each step: give it process_group=, the ranks "
                "of a node, or the module in it if a node is one rank"
            )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        ranks = parameter.device_mesh.mesh.flatten().tolist()
        if others.intersection(ranks):
            raise InputError(
                f"{CALLER}: {name} is spread over the ranks {first_few([*map(str, ranks)])}, which "
                'are of several nodes: call fully_shard with mesh["shard"], the axis of the ranks '
                "of a node, so that each node has a whole model"
            )


def _connect(nodes: dist.ProcessGroup) -> OuterGroup:
    """Connect with the other nodes, apart from all that other calls have connected."""
    store = store_of(nodes, "local SGD")
    call = store.add(f"calls of {nodes.rank()}", 1)
    limit = time_limit(dist.group.WORLD) or NO_LIMIT
    return OuterGroup(dist.PrefixStore(str(call), store), nodes.rank(), nodes.size(), limit)


def _require_same_start(local: LocalSteps) -> None:
    """Raise InputError unless nodes have the same weights, buffers and settings."""
    own: dict[str, Any] = {"settings": (local.schedule, local.options)}
    for each in local.parts:
        own |= each.beginning
    for node, others in enumerate(local.group.gather(own)):
        if differing := [name for name in {**own, **others} if others.get(name) != own.get(name)]:
            raise InputError(
                f"{CALLER}: nodes {local.group.node} and {node} differ in {first_few(differing)}: "
                "give all nodes the same settings, weights and buffers, as of one seed or file; "
                "load each node's own checkpoint after this call"
            )


def _not_exchanged(optimizer: torch.optim.Optimizer, weights: TrainedWeights) -> list[nn.Parameter]:
    """Return what an optimizer trains that is none of these weights, or of their fp32 ones."""
    known = weights.named.values()
    held = {id(each) for each in (*known, *map(weights.masters.get, known))}
    groups = (group["params"] for group in optimizer.param_groups)
    return [
        each for group in groups for each in group if each.requires_grad and id(each) not in held
    ]


def _of_all(optimizer: torch.optim.Optimizer, weights: TrainedWeights) -> TrainedWeights:
    """Return the weights; raise InputError unless they are of all that the optimizer trains."""
    if others := _not_exchanged(optimizer, weights):
        raise InputError(
            f"{CALLER}: the optimizer trains parameters that the model lacks, of the shapes "
            f"{first_few([str(tuple(each.shape)) for each in others])}: give a model that has all, "
            "as nn.ModuleList([model, loss]), and make the optimizer after sharding"
        )
    return weights


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a state, and the shapes of its tensors."""
    tensors = {name: tuple(each.shape) for name, each in state.items() if isinstance(each, Tensor)}
    return {**state, **tensors}
