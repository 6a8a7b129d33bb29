"""What a plan compares: sizes of axes, settings of ZeRO, micro-batches, recomputation."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from math import gcd, prod
from types import MappingProxyType
from typing import Any

from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.replicas import INTERVAL, interval_of, with_interval
from megatron_zpp.planner.timing.balanced_stages import (
    BY_TYPE,
    LayerSeconds,
    balanced_stages,
    stage_flags,
)
from megatron_zpp.planner.zero_settings import ZeroSettings
from megatron_zpp.settings.config import Config, ParallelConfig
from megatron_zpp.settings.parallel import LAYERS_OF_ENDS, STAGES_PER_RANK
from zeropp import ZeroConfig
from zeropp.errors import InputError
from zeropp.settings import JsonSection
from zeropp.wire import Nodes

# Two step times that differ by less are not told apart: the median error of predicted speedups
# (docs/planning.md).
TIE = 0.07
LARGEST_MICRO_BATCH = 64  # samples
LARGEST_PIPELINE = 16  # ranks
NUMBERS_OF_STAGES = (1, 2)  # of a rank
LONG_SEQUENCE = 16384  # tokens, of which context ranks have half or more each
COMPARED = frozenset(
    "zero_quantized_weights zero_quantized_gradients zero_hpz_partition_size weight_steps "
    f"zero_quantized_nontrainable_weights code_messages weight_bits gradient_bits {INTERVAL} "
    "nontrainable_weight_bits reduce_gradients_once".split()
)  # keys of the JSON
RECOMPUTED = MappingProxyType({"none": None, "attention": "selective", "all": "full"})
SIZES = "T P C E: tensor, pipeline (x stages per rank), context and expert parallel sizes"
RECOMPUTED_IN_WORDS = MappingProxyType(
    {"none": "no recomputation", "attention": "attention recomputed", "all": "blocks recomputed"}
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration of a run; `config` is complete."""

    settings: ZeroSettings
    micro_batch: int
    recomputed: str  # a key of `RECOMPUTED`
    config: Config

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Tensor, pipeline and context parallel size, and stages of each rank of a pipeline."""
        parallel = self.config.parallel
        size = parallel.pipeline_model_parallel_size
        return (
            parallel.tensor_model_parallel_size,
            size,
            parallel.context_parallel_size,
            len(parallel.stages(self.config.model.num_layers)) // size,
        )

    @property
    def expert_ranks(self) -> int | None:
        """How many ranks split the experts; None for a dense model."""
        has_experts = self.config.model.has_experts
        return self.config.parallel.expert_model_parallel_size if has_experts else None

    def every(self, interval: int) -> "Candidate":
        """Return this configuration of replicas with another interval."""
        zero = with_interval(self.config.zero, interval)
        config = replace(self.config, zero=zero)
        return replace(self, settings=self.settings.every(interval), config=config)

    @property
    def interval(self) -> int:
        """The steps that nodes take alone between exchanges; 1: they take each step together."""
        return interval_of(self.config.zero)

    @property
    def is_divided(self) -> bool:
        """Whether ranks split the model beside the data axis."""
        return prod(self.sizes) > 1

    @property
    def traits(self) -> set[object]:
        """What it may be the first of in a table: its settings of ZeRO, and its sizes."""
        return {self.settings.name, self.sizes, ("experts", self.expert_ranks)}

    @property
    def short_sizes(self) -> str:
        """The sizes in a cell of a table."""
        tensor, pipe, context, chunks = self.sizes
        stages = f"{pipe}x{chunks}" if chunks > 1 else str(pipe)
        return f"{tensor} {stages} {context} {self.expert_ranks or 1}"

    @property
    def flags(self) -> dict[str, int | str | None]:
        """The flags that it needs beside its JSON; those without a value have ""."""
        tensor, pipe, context, chunks = self.sizes
        parallel = self.config.parallel
        flags = {
            "--micro-batch-size": self.micro_batch,
            "--recompute-granularity": RECOMPUTED[self.recomputed],
            "--tensor-model-parallel-size": tensor if tensor > 1 else None,
            "--pipeline-model-parallel-size": pipe if pipe > 1 else None,
            "--num-virtual-stages-per-pipeline-rank": chunks if chunks > 1 else None,
            **(stage_flags(parallel) if pipe > 1 else {}),
            "--context-parallel-size": context if context > 1 else None,
            "--expert-model-parallel-size": self.expert_ranks,
            "--cp-comm-type": parallel.cp_comm_type if context > 1 else None,
            "--sequence-parallel": "" if tensor > 1 and parallel.sequence_parallel else None,
        }
        return {name: value for name, value in flags.items() if value is not None}

    def __str__(self) -> str:
        tensor, pipe, context, chunks = self.sizes
        sizes = {"tensor": tensor, "pipeline": pipe, "stages a rank": chunks, "context": context}
        axes = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        uneven = stage_flags(self.config.parallel) if pipe > 1 else {}
        axes += [f"{name} {value}" for name, value in uneven.items()]
        if self.expert_ranks is not None:
            axes.append(f"experts over {self.expert_ranks}")
        if self.interval > 1:
            axes.append(f"exchanged every {self.interval} steps")
        name = ", ".join([*axes, self.settings.name])
        return f"{name}, micro-batch {self.micro_batch}, {RECOMPUTED_IN_WORDS[self.recomputed]}"


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a plan compares on `nodes`: the configuration of the flags, `base`, and others."""

    base: Config
    nodes: Nodes

    def all_parallel(self, seconds: LayerSeconds) -> Iterator[tuple[ParallelConfig, Nodes]]:
        """Yield how the ranks may share the work of `base`, and the nodes of the data axis.

        The first is without axes beside the data axis. Tensor ranks stay in a node, with sequence
        parallelism; context ranks are for long sequences, or where `base` has them. Stages are
        balanced by the `seconds` of layers.
        """
        base, nodes = self.base, self.nodes
        length, own_size = base.model.seq_length, base.parallel.context_parallel_size
        own_pipe, layers = base.parallel.pipeline_model_parallel_size, base.model.num_layers
        own_chunks = len(base.parallel.stages(layers)) // own_pipe
        powers = (2**i for i in range(1, 7) if length >= 2 ** (i - 1) * LONG_SEQUENCE)
        contexts = sorted({1, own_size, *powers})
        pipes = sorted({*range(1, min(LARGEST_PIPELINE, layers) + 1), own_pipe})
        all_chunks = sorted({*NUMBERS_OF_STAGES, own_chunks})
        for tensor, pipe, context, chunks in product(
            _divisors(nodes.ranks_per_node), pipes, contexts, all_chunks
        ):
            if chunks > 1 and pipe == 1 or nodes.num_ranks % pipe:
                continue
            sized = replace(
                base.parallel,
                tensor_model_parallel_size=tensor,
                sequence_parallel=tensor > 1,
                pipeline_model_parallel_size=pipe,
                num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
                num_layers_per_virtual_pipeline_stage=None,
                context_parallel_size=context,
            )
            for staged, size in product(
                balanced_stages(sized, base.parallel, seconds, TIE), self._expert_sizes(sized)
            ):
                parallel = replace(staged, expert_model_parallel_size=size)
                with suppress(InputError):  # of sizes that the trainer would refuse
                    yield parallel, self._data_nodes(parallel)

    def _expert_sizes(self, parallel: ParallelConfig) -> list[int | None]:
        """Return how many ranks may split experts, the first by default.

        Alone, all experts on each rank, the most ranks of a node and all numbers of whole nodes are
        compared; where other axes split the model, the most ranks of a node.
        """
        base, nodes = self.base, self.nodes
        if not base.model.has_experts:
            return [base.parallel.expert_model_parallel_size]
        stage_ranks = nodes.num_ranks // parallel.pipeline_model_parallel_size
        in_node = gcd(base.model.num_experts, stage_ranks, nodes.ranks_per_node)
        default = in_node if in_node % parallel.tensor_model_parallel_size == 0 else 1
        if stage_ranks < nodes.num_ranks or parallel.tensor_model_parallel_size > 1:
            return [default]
        whole_nodes = [
            size
            for size in _divisors(gcd(base.model.num_experts, stage_ranks))
            if size > nodes.ranks_per_node and size % nodes.ranks_per_node == 0
        ]
        return [*dict.fromkeys((default, 1, *whole_nodes))]

    def _data_nodes(self, parallel: ParallelConfig) -> Nodes:
        """Return the nodes of the data axis; raises InputError as the trainer does."""
        batch = replace(self.base.batch, micro_batch_size=1)  # others are compared
        config = replace(self.base, batch=batch, parallel=parallel)
        replicas = parallel.data_parallel_size(self.nodes.num_ranks)
        config.schedules.batch_size.check(replicas)
        config.require_divisible(replicas)
        ranks = PlannedRanks(config=config, nodes=self.nodes)
        if ranks.inner_size > 1:
            ranks.nodes_of(ranks.inner_size)
        return ranks.data_nodes

    def why_undivided(self, name: str) -> str | None:
        """Return what the trainer says to the smallest size of an axis; None if it takes it."""
        base, nodes = self.base, self.nodes
        in_node = name == "tensor_model_parallel_size"
        sizes = _divisors(nodes.ranks_per_node if in_node else nodes.num_ranks)
        plain = dict.fromkeys((*LAYERS_OF_ENDS, *STAGES_PER_RANK))
        shares = plain | {"pp_partition_method": BY_TYPE[0]}  # which need not be equal
        try:
            for size in sizes[1:2]:
                parallel = replace(base.parallel, **({} if in_node else shares), **{name: size})
                parallel = replace(parallel, sequence_parallel=in_node)
                experts, *_ = self._expert_sizes(parallel)
                parallel = replace(parallel, expert_model_parallel_size=experts)
                parallel.stages(base.model.num_layers)
                self._data_nodes(parallel)
        except InputError as error:
            return str(error)
        return None

    def candidates(
        self, settings: ZeroSettings, num_replicas: int, parallel: ParallelConfig | None = None
    ) -> Iterator[Candidate]:
        """Yield `base` with other settings, with every micro-batch and recomputation.

        The global batch stays, and if `parallel` is None the sizes of axes. Micro-batches ascend,
        so that what follows one that does not fit in memory need not be looked at.
        """
        base = self.base if parallel is None else replace(self.base, parallel=parallel)
        final = base.schedules.batch_size.final
        share = 0 if final % num_replicas else final // num_replicas
        most = min(share, LARGEST_MICRO_BATCH)
        sizes = [size for size in range(1, most + 1) if share % size == 0]
        if base.parallel.num_virtual_stages_per_pipeline_rank:
            group = base.parallel.pipeline_model_parallel_size
            sizes = [size for size in sizes if share // size % group == 0]
        zeros = {
            size: _with_settings(base.zero, settings, size, share // size)
            for size in sizes
            if size & (size - 1) == 0
        }
        for recomputed, granularity in RECOMPUTED.items():
            recompute = replace(
                base.recompute,
                recompute_granularity=granularity,
                recompute_method="uniform" if granularity == "full" else None,
                recompute_num_layers=1,
            )
            for size, zero in zeros.items():
                batch = replace(base.batch, micro_batch_size=size)
                config = replace(base, zero=zero, recompute=recompute, batch=batch)
                yield Candidate(
                    settings=settings, micro_batch=size, recomputed=recomputed, config=config
                )

    @property
    def given(self) -> Candidate:
        """The configuration that the flags ask for."""
        base, names = self.base, {value: name for name, value in RECOMPUTED.items()}
        return Candidate(
            settings=ZeroSettings.given(base.zero),
            micro_batch=base.batch.micro_batch_size,
            recomputed=names[base.recompute.recompute_granularity],
            config=base,
        )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _with_settings(
    zero: ZeroConfig, settings: ZeroSettings, micro_batch: int, num_micro_batches: int
) -> ZeroConfig:
    sizes = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": num_micro_batches,
    }
    return replace(
        zero,
        zero_optimization=_changed(zero.zero_optimization, settings.zero),
        zeropp=_changed(zero.zeropp, settings.zeropp),
        **{name: size for name, size in sizes.items() if zero.value(name) is not None},
    )


def _changed(section: JsonSection, values: Mapping[str, Any]) -> JsonSection:
    """Return a section in which keys that plans compare have these values, or their defaults."""
    defaults = {each.name: each.default for each in fields(section) if each.name in COMPARED}
    return replace(section, **defaults | values)
