"""The settings that a plan compares: sizes of axes, stages, quantization, micro-batches,
recomputation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import gcd, prod
from types import MappingProxyType
from typing import Any

from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.replicas import INTERVAL, interval_of, with_interval
from megatron_zpp.planner.timing.balanced_stages import BY_TYPE, LayerSeconds, balanced_stages
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


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Settings of ZeRO: keys of the JSON's `zero_optimization` and `zeropp`.

    inexactness: 0 for what computes as unquantized training does, larger for fewer bits.
    """

    name: str
    inexactness: int
    zero: Mapping[str, Any]
    zeropp: Mapping[str, Any] = field(default_factory=dict)

    def every(self, interval: int) -> "ZeroSettings":
        """Return these settings in nodes that step alone, and exchange after so many steps."""
        return replace(self, zeropp={**self.zeropp, INTERVAL: interval})

    def to_json(self) -> dict[str, Any]:
        """Return the part of a DeepSpeed JSON that asks for these settings."""
        keys = {"zero_optimization": dict(self.zero)}
        return keys | ({"zeropp": dict(self.zeropp)} if self.zeropp else {})


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
        """Return this configuration of nodes that step alone with another interval."""
        config = with_interval(self.config, interval)
        return replace(self, settings=self.settings.every(interval), config=config)

    @property
    def interval(self) -> int:
        """The steps that nodes take alone between exchanges; 1: they take each step together."""
        return interval_of(self.config)

    @property
    def is_divided(self) -> bool:
        """Whether ranks split the model beside the data axis."""
        return prod(self.sizes) > 1


def all_parallel(
    base: Config, nodes: Nodes, seconds: LayerSeconds
) -> Iterator[tuple[ParallelConfig, Nodes]]:
    """Yield how ranks of `nodes` may share the work of `base`, and the nodes of the data axis.

    The first is without axes beside the data axis. Tensor ranks stay in a node, with sequence
    parallelism; context ranks are for long sequences, or where `base` has them. Stages are balanced
    by the `seconds` of layers.
    """
    length, own_size = base.model.seq_length, base.parallel.context_parallel_size
    own_pipe, layers = base.parallel.pipeline_model_parallel_size, base.model.num_layers
    own_chunks = len(base.parallel.stages(layers)) // own_pipe
    contexts = {1, own_size, *(2**i for i in range(1, 7) if length >= 2 ** (i - 1) * LONG_SEQUENCE)}
    pipes = sorted({*range(1, min(LARGEST_PIPELINE, layers) + 1), own_pipe})
    all_chunks = sorted({*NUMBERS_OF_STAGES, own_chunks})
    for tensor, pipe, context, chunks in product(
        _divisors(nodes.ranks_per_node), pipes, sorted(contexts), all_chunks
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
            balanced_stages(sized, base.parallel, seconds, TIE), _expert_sizes(base, sized, nodes)
        ):
            parallel = replace(staged, expert_model_parallel_size=size)
            data_nodes = _data_nodes(base, parallel, nodes)
            if data_nodes is not None:
                yield parallel, data_nodes


def _expert_sizes(base: Config, parallel: ParallelConfig, nodes: Nodes) -> list[int | None]:
    """Return how many ranks may split experts, the first by default.

    Alone, all experts on each rank, the most ranks of a node and all numbers of whole nodes are
    compared; where other axes split the model, the most ranks of a node.
    """
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


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _data_nodes(base: Config, parallel: ParallelConfig, nodes: Nodes) -> Nodes | None:
    """Return the nodes of the data axis; None for sizes that the trainer would refuse."""
    try:
        return _checked_nodes(base, parallel, nodes)
    except InputError:
        return None


def _checked_nodes(base: Config, parallel: ParallelConfig, nodes: Nodes) -> Nodes | None:
    base = replace(base, batch=replace(base.batch, micro_batch_size=1))  # others are compared
    replicas = parallel.data_parallel_size(nodes.num_ranks)
    base.schedules.batch_size.check(replicas)
    replace(base, parallel=parallel).require_divisible(replicas)
    size = parallel.expert_model_parallel_size or 1
    ranks = PlannedRanks(parallel=parallel, nodes=nodes, expert_ranks=size)
    return ranks.data_nodes if ranks.expert_nodes else None


def why_undivided(base: Config, nodes: Nodes, name: str) -> str | None:
    """Return what the trainer says to the smallest size of an axis; None if it takes it."""
    in_node = name == "tensor_model_parallel_size"
    sizes = _divisors(nodes.ranks_per_node if in_node else nodes.num_ranks)
    plain = dict.fromkeys((*LAYERS_OF_ENDS, *STAGES_PER_RANK))
    shares = plain | {"pp_partition_method": BY_TYPE[0]}  # which need not be equal
    try:
        for size in sizes[1:2]:
            parallel = replace(base.parallel, **({} if in_node else shares), **{name: size})
            parallel = replace(parallel, sequence_parallel=in_node)
            experts, *_ = _expert_sizes(base, parallel, nodes)
            parallel = replace(parallel, expert_model_parallel_size=experts)
            parallel.stages(base.model.num_layers)
            _checked_nodes(base, parallel, nodes)
    except InputError as error:
        return str(error)
    return None


def settings_of(base: Config, nodes: Nodes, *, is_divided: bool) -> list[ZeroSettings]:
    """Return the settings of ZeRO that are compared on a data axis of these nodes.

    `is_divided`: ranks split the model beside it.
    """
    if base.lora.lora_rank:
        return adapter_settings(nodes.count, nodes.ranks_per_node * nodes.parts)
    if is_divided:
        return divided_settings(nodes)
    return all_settings(nodes.count, nodes.ranks_per_node)


def adapter_settings(num_nodes: int, ranks_per_node: int) -> list[ZeroSettings]:
    """Return the settings of ZeRO for adapters of frozen weights, which may be stored as codes."""
    plain = [
        ZeroSettings(name=f"stage {stage}", inexactness=0, zero={"stage": stage})
        for stage in (0, 1, 2, 3)
    ]
    if num_nodes * ranks_per_node == 1:
        plain = plain[:1]
    kept: dict[str, Any] = {"stage": 3}
    if num_nodes > 1 and ranks_per_node > 1:
        kept["zero_hpz_partition_size"] = ranks_per_node
        plain.append(ZeroSettings(name="stage 3, hpZ", inexactness=0, zero=kept))
    stored = kept | {"zero_quantized_nontrainable_weights": True}
    four_bits = {"nontrainable_weight_bits": 4}
    return [
        *plain,
        ZeroSettings(name="MixZ++, INT8", inexactness=1, zero=stored),
        ZeroSettings(name="MixZ++, INT4", inexactness=2, zero=stored, zeropp=four_bits),
    ]


def divided_settings(nodes: Nodes) -> list[ZeroSettings]:
    """Return the settings of ZeRO that are compared where ranks split the model, on a data axis.

    They are those of `all_settings` that send least for what they hold: stages 1 and 3 as they are
    and with gradients once, quantized where the data axis crosses nodes.
    """
    settings = all_settings(nodes.count, nodes.ranks_per_node * nodes.parts)
    if nodes.num_ranks == 1:
        return settings[:1]
    names = ["stage 1", "stage 3", "stage 3, gradients once"]
    if nodes.count > 1:
        names += ["stage 1, qwZ qgZ", "stage 3, hpZ, gradients once", "stage 3, qwZ hpZ qgZ"]
        names += ["stage 3, qwZ hpZ qgZ, gradients once"]
    return [each for each in settings if each.name in names]


def all_settings(num_nodes: int, ranks_per_node: int) -> list[ZeroSettings]:
    """Return the settings of ZeRO that are worth comparing on such nodes."""
    qwz, qgz = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
    hpz, both = {"zero_hpz_partition_size": ranks_per_node}, qwz | qgz
    every, once = hpz | both, {"reduce_gradients_once": True}
    steps = {"weight_steps": True, "code_messages": True}
    three_bits = steps | {"gradient_bits": (8, 3)}
    rows: list[tuple[int, str, int, Mapping, Mapping]] = [(0, "", 0, {}, {})]
    if num_nodes * ranks_per_node > 1:
        ways = enumerate({"": {}, "qwZ": qwz, "qgZ": qgz, "qwZ qgZ": both}.items())
        rows += [
            (stage, name, inexactness, keys, {})
            for stage, (inexactness, (name, keys)) in product((1, 2, 3), ways)
        ]
        rows.append((3, "gradients once", 0, {}, once))
    if num_nodes > 1 and ranks_per_node > 1:
        rows += [
            (3, "hpZ", 0, hpz, {}),
            (3, "hpZ, gradients once", 0, hpz, once),
            (3, "qwZ hpZ", 1, hpz | qwz, {}),
            (3, "hpZ qgZ", 2, hpz | qgz, {}),
            (3, "qwZ hpZ qgZ", 3, every, {}),
            (3, "qwZ hpZ qgZ, gradients once", 3, every, once),
            (3, "qwZ hpZ qgZ, INT4 in the node too", 4, every, {"gradient_bits": (4, 4)}),
            (3, "qwZ hpZ qgZ, steps of codes", 5, every, steps),
            (3, "qwZ hpZ qgZ, steps of codes, INT3", 6, every, three_bits),
            (3, "qwZ hpZ qgZ, steps of codes, INT3, gradients once", 6, every, three_bits | once),
        ]
    return [
        ZeroSettings(
            name=f"stage {stage}, {name}" if name else f"stage {stage}",
            inexactness=inexactness,
            zero={"stage": stage, **keys},
            zeropp=zeropp,
        )
        for stage, name, inexactness, keys, zeropp in rows
    ]


def given_settings(zero: ZeroConfig) -> ZeroSettings:
    """Return the settings of ZeRO that the flags and the JSON ask for."""
    optimization = zero.zero_optimization
    parts = [f"stage {zero.stage} as given"]
    parts += ["qwZ"] * optimization.zero_quantized_weights
    parts += ["hpZ"] * (optimization.zero_hpz_partition_size > 1)
    parts += ["qgZ"] * optimization.zero_quantized_gradients
    parts += ["MixZ++"] * (zero.placement.frozen_bits is not None)
    inexactness = optimization.zero_quantized_weights + 2 * optimization.zero_quantized_gradients
    return ZeroSettings(name=", ".join(parts), inexactness=inexactness, zero={})


def candidates_of(
    base: Config,
    settings: ZeroSettings,
    num_replicas: int,
    parallel: ParallelConfig | None = None,
) -> Iterator[Candidate]:
    """Yield `base` with other settings, with every micro-batch and recomputation.

    The global batch stays, and if `parallel` is None the sizes of axes. Micro-batches ascend, so
    that what follows one that does not fit in memory need not be looked at.
    """
    base = base if parallel is None else replace(base, parallel=parallel)
    final = base.schedules.batch_size.final
    share = 0 if final % num_replicas else final // num_replicas
    sizes = [size for size in range(1, min(share, LARGEST_MICRO_BATCH) + 1) if share % size == 0]
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


def given_candidate(base: Config) -> Candidate:
    """Return the configuration that the flags ask for."""
    granularity = base.recompute.recompute_granularity
    names = {value: name for name, value in RECOMPUTED.items()}
    return Candidate(
        settings=given_settings(base.zero),
        micro_batch=base.batch.micro_batch_size,
        recomputed=names[granularity],
        config=base,
    )


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
