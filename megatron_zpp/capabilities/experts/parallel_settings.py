"""How ranks share out experts: over how many of them a layer's are split."""

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from megatron_zpp.capabilities.experts.model_settings import NEEDS_EXPERTS
from megatron_zpp.settings.flag import Section, flag
from zeropp.errors import InputError

if TYPE_CHECKING:
    from zeropp.wire.rank_group import Nodes


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig(Section):
    """How ranks share out experts (of ParallelConfig)"""

    expert_model_parallel_size: int | None = flag(
        None,
        "consecutive ranks that split the experts of a layer (default: as many of a node as divide "
        "the experts; 1 without ZeRO, and with tensor parallelism that does not split sequences)",
        minimum=1,
        aliases=("moe-expert-parallel-size",),
        no_effect=NEEDS_EXPERTS,
    )
    moe_dispatch_bits: int = flag(
        16,
        "bits of a number in rows that cross nodes on their way to experts, where nodes split them",
        choices=(8, 16),
        no_effect=NEEDS_EXPERTS,
    )


def expert_ranks(config: Any, nodes: "Nodes") -> int:
    """Return how many consecutive ranks split the experts of a layer; 1 for a dense model.

    Raises InputError for a --expert-model-parallel-size that does not fit.
    """
    if not config.model.has_experts:
        return 1
    model, parallel = config.model, config.parallel
    size, tensor = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    num_experts, ranks_per_node = model.num_experts, nodes.ranks_per_node
    stage_ranks = nodes.num_ranks // parallel.pipeline_model_parallel_size
    repeats_tokens = tensor > 1 and not parallel.sequence_parallel
    if size is None:
        if repeats_tokens or config.zero.stage == 0:
            return 1
        most = gcd(num_experts, stage_ranks, ranks_per_node)
        return most if most % tensor == 0 else 1
    shown = f"--expert-model-parallel-size {size}"
    if size > 1 and repeats_tokens:
        raise InputError(
            f"{shown} needs tensor ranks with tokens of their own: add --sequence-parallel "
            "beside --tensor-model-parallel-size, or set 1"
        )
    steps_alone = config.zero.zeropp.sync_every != 1
    alone = " in a node, which zeropp.sync_every lets step alone" if steps_alone else ""
    for number, what in (
        (num_experts, f"the {num_experts} experts of --num-experts"),
        (stage_ranks, f"the {stage_ranks} ranks that share the layers{alone}"),
    ):
        if number % size:
            raise InputError(
                f"{shown} does not divide {what}: use {gcd(num_experts, stage_ranks)} or a "
                "divisor of it"
            )
    if ranks_per_node % size and size % ranks_per_node:
        raise InputError(
            f"{shown} is neither a part of a node's {ranks_per_node} ranks nor whole nodes: "
            f"use a divisor or a multiple of {ranks_per_node}"
        )
    if size > 1 and size % tensor:
        raise InputError(
            f"{shown} is not a multiple of --tensor-model-parallel-size {tensor}: the tensor "
            "ranks of a sequence send its tokens to other experts each; use a multiple, or 1"
        )
    return size
