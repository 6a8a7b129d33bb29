"""Replicas that train independently and synchronize every H steps, fixed or elastic."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.capabilities.local_sgd.continuation import continue_replica
from megatron_zpp.checkpoint.iteration_folders import (
    checkpoint_folder,
    checkpoint_name,
    folder_of_node,
)
from megatron_zpp.checkpoint.training_state import read_state
from megatron_zpp.monitor.communication import size
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.replicas import Joining, Replicas
from megatron_zpp.settings.config import CheckpointConfig, ParallelConfig
from zeropp import Sharding, ZeroConfig
from zeropp.capabilities.local_sgd import (
    HOST,
    ElasticGroup,
    ElasticOptions,
    ElasticSteps,
    LocalSteps,
    OfSharding,
    OuterGroup,
    Saved,
    TrainedWeights,
    join_elastic_group,
    join_outer_group,
)
from zeropp.ranks import Environment, world_store
from zeropp.settings import CAPABILITIES, declared
from zeropp.wire import Traffic

SAME_NODES = (
    "start all nodes with the same command line, the same JSON, the same versions and as many "
    "ranks; only paths may differ"
)


class LocalSGD(Replicas):
    """Replicas of fixed number: an outer step takes all of them."""

    independent = True
    kind = LocalSteps

    def __init__(self, group: OuterGroup) -> None:
        self.group = group
        self.launch, self.number, self.planned = group.launch, group.number, group.planned
        self.steps: LocalSteps | None = None

    def bind(self, zero: ZeroConfig, sharding: Sharding, optimizer: torch.optim.Optimizer) -> None:
        self.stage = sharding.stage
        weights = TrainedWeights(model=OfSharding(sharding), optimizer=optimizer)
        self.steps = self.kind.of(zero.zeropp, weights, self.group)

    @property
    def index(self) -> int:
        return self.group.node

    @property
    def count(self) -> int:
        return self.group.size

    @property
    def ledger(self) -> Traffic:
        return self.group.traffic

    def gather(self, value: Any) -> list[Any]:
        return self.group.gather(value)

    def sum(self, *values: float) -> list[float]:
        return self.group.sum(*values)

    def sum_in_step(self, step: int, values: Tensor) -> Tensor:
        if not self.steps.schedule.averages_gradients(step):
            return values
        total = self.steps.sum(lambda *_: values.flatten().tolist())
        return values.new_tensor(total).view_as(values)

    def before_update(self, step: int) -> None:
        self.steps.before_update(step)

    def after_update(self, step: int, *, last: bool) -> None:
        self.steps.after_update(step, is_last=last)

    def aligned(self, step: int) -> bool:
        return self.steps.meets(step)

    def kept(self, newest: int | None, *, beside: bool) -> int | None:
        """Return how many checkpoints stay, so that all replicas have one of the same iteration.

        Some may be a save ahead of others, or two if saves run beside training.
        """
        return (newest or 1) + (2 if beside else 1)

    def state(self) -> Mapping[str, Tensor]:
        return self.steps.state()

    def resume(self, read: Mapping[str, Tensor], *saved: Any) -> None:
        continue_replica(self, read, *saved)

    def expected(self, step: int | None = None) -> Mapping[tuple[str, str], float]:
        start, _ = self.steps.schedule.phases[-1]
        return self.steps.expected_traffic(start + 1 if step is None else step)

    def notices(self, zero: ZeroConfig) -> Iterator[str]:
        idle = {
            "zero_hpz_partition_size": zero.zero_optimization.zero_hpz_partition_size > 1,
            **{name: zero.value(name) for name in declared("ACROSS_NODES", CAPABILITIES)},
            "zeropp.code_messages": zero.zeropp.code_messages,
        }
        within = {
            "zero_quantized_weights": zero.zero_optimization.zero_quantized_weights,
            "zero_quantized_gradients": zero.zero_optimization.zero_quantized_gradients,
        }
        parts = [
            f"{', '.join(names)} {effect}"
            for keys, effect in (
                (idle, "without effect"),
                (within, "only between the ranks of a node"),
            )
            if (names := [name for name, is_set in keys.items() if is_set])
        ]
        if parts:
            yield f"replicas train independently, no step crosses nodes: {'; '.join(parts)}"

    def rows(self, ranks: Ranks) -> Iterator[tuple[str, str]]:
        """Yield when replicas synchronize, in how many bits, and what a rank keeps for it."""
        options, fragments = self.steps.options, self.steps.fragments
        of_world = ranks.nodes.ranks_per_node * ranks.nodes.parts
        nodes = -(-ranks.num_ranks // of_world)
        each = "" if nodes == 1 else f" groups of {nodes} nodes"
        agreed = size(sum(tensor.nbytes for each in fragments for tensor in each.agreed))
        owned = size(
            sum(
                tensor.nbytes
                for each in fragments
                for tensor in (each.momentum, each.mean.error, *each.mean.unsent)
            )
        )
        where = " on the host" if options.on_host and ranks.device != HOST else ""
        yield (
            "nodes",
            f"{self.count}{each} that train independently, synchronized "
            f"{self.steps.schedule} in {options.bits} bits\n"
            f"outer learning rate {options.lr:g}, momentum {options.momentum:g}; a rank keeps "
            f"{agreed} of global parameters{where},\n{owned} of momentum and rounding errors",
        )

    def close(self, *, succeeded: bool) -> None:
        if succeeded:
            self.group.close()


class ElasticLocalSGD(LocalSGD):
    """Replicas may join or leave; each outer step is committed by all who remain, or by none."""

    joins_and_leaves = True
    kind = ElasticSteps

    def __init__(self, group: ElasticGroup) -> None:
        super().__init__(group)
        self.iteration = group.iteration

    @property
    def joins(self) -> bool:
        return self.group.joins

    @property
    def membership(self) -> object:
        return self.group.members

    def sum(self, *values: float) -> list[float]:
        """Return the values of this replica, as others may do something else."""
        return list(values)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def join(self, progress: Any) -> bool:
        self.steps.follow(progress)
        joins = self.group.joins
        if joins:
            self.steps.join()
        return joins

    def evaluate(self, sums_of: Callable[[int, int], Sequence[float]]) -> Sequence[float]:
        """Share an evaluation among replicas that have the same weights, as after an outer step.

        Between outer steps replicas do not wait for others: each computes the whole with its own.
        """
        return self.steps.sum(sums_of) if self.steps.has_peers else sums_of(0, 1)

    def close(self, *, succeeded: bool) -> None:
        self.group.close()


def joining(
    zero: ZeroConfig,
    checkpoint: CheckpointConfig,
    parallel: ParallelConfig,
    environment: Environment,
    settings: Mapping[str, str],
) -> Joining:
    """Return how replicas that train independently begin."""
    options = zero.zeropp
    if options.sync_store is None:
        per_node = options.ranks_per_node or environment.local_world_size
        world = environment.within(parallel.world_ranks(per_node))

        def join(store: dist.Store, limit: timedelta) -> tuple[Replicas, dist.Store]:
            group = join_outer_group(store, environment, world, limit)
            return LocalSGD(group), world_store(store, environment, world)

        return Joining(world=world, join=join)
    elastic = ElasticOptions(
        address=options.sync_store,
        num_nodes=options.sync_nodes,
        settings={"the ranks of a node": str(environment.world_size), **settings},
        advice=SAME_NODES,
        saved_by=partial(saved_by_replica, checkpoint),
    )
    return Joining(
        world=environment,
        join=lambda store, limit: (
            ElasticLocalSGD(join_elastic_group(elastic, environment, limit)),
            store,
        ),
    )


def saved_by_replica(options: CheckpointConfig, number: int) -> Saved:
    """Identify the checkpoint from which replica `number` resumes."""
    if options.load is None or options.finetune:
        return Saved()
    folder = folder_of_node(Path(options.load), number)
    iteration = options.ckpt_step
    if iteration is None:
        latest = checkpoint_folder(folder).latest()
        iteration = int(latest) if latest is not None and latest.isdecimal() else 0
    path = folder / checkpoint_name(iteration)
    if not iteration or not path.is_dir():
        return Saved()
    state = read_state(path)
    return Saved(iteration, state.launch, state.node)
