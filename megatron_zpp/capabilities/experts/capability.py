"""What experts say of a GPT's run."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor

from megatron_zpp.capabilities.experts.axis import AXIS_NAMES, NAME, ExpertAxis, expert_axis
from megatron_zpp.capabilities.experts.balance import ExpertBalance
from megatron_zpp.capabilities.experts.routing_record import RoutingStep
from megatron_zpp.recipe.capability import Capability
from megatron_zpp.settings.config import Config, ModelConfig
from zeropp.settings.schema import no_effect_line
from zeropp.wire.rank_group import Nodes
from zeropp.wire.route import UNQUANTIZED

log = logging.getLogger("megatron_zpp")


@dataclass(kw_only=True)
class ExpertCapability(Capability):
    """Layers of experts, which ranks may split, and the balance of their load."""

    splits = NAME

    @classmethod
    def is_on(cls, config: Config) -> bool:
        """Whether the model has experts."""
        return config.model.has_experts

    @classmethod
    def settled(cls, config: Config, nodes: Nodes) -> Config:
        """Return a configuration that says how many ranks split experts.

        Raises InputError for a --expert-model-parallel-size that does not fit.
        """
        size = expert_ranks(config, nodes)
        return replace(config, parallel=replace(config.parallel, expert_model_parallel_size=size))

    def axis(self) -> ExpertAxis | None:
        """Return the axis over which ranks split experts, if they do.

        Logs which settings have no effect. Raises InputError for a --expert-model-parallel-size
        that does not fit.
        """
        log_settings_without_effect(self.config, self._axis)
        return self._axis

    def records(self, num_micro_batches: int, scale: float | Tensor) -> RoutingStep:
        """Return the records of a step's micro-batches."""
        return self._balance.begin(num_micro_batches, scale)

    def after_passes(self, step: int, records: RoutingStep) -> Mapping[str, Tensor]:
        """Return the losses that balance experts, and their loads; move the bias of experts."""
        over_replicas = partial(self.ranks.replicas.sum_in_step, step)
        return self._balance.end(records, self.sharding.model, over_replicas)

    def model_rows(self) -> Iterator[tuple[str, str]]:
        """Yield how many experts there are, and which ranks have them."""
        yield expert_row(self.config.model, self._axis)

    @cached_property
    def _axis(self) -> ExpertAxis | None:
        size = expert_ranks(self.config, self.ranks.nodes)
        return expert_axis(self.ranks, size, self.config.parallel.moe_dispatch_bits)

    @cached_property
    def _balance(self) -> ExpertBalance:
        return ExpertBalance(config=self.config, ranks=self.ranks)


def expert_ranks(config: Config, nodes: Nodes) -> int:
    """Return how many consecutive ranks split the experts of a layer; 1 for a dense model.

    Raises InputError for a --expert-model-parallel-size that does not fit.
    """
    model, parallel = config.model, config.parallel
    if not model.has_experts:
        return 1
    stage_ranks = nodes.num_ranks // parallel.pipeline_model_parallel_size
    return parallel.expert_ranks(
        model.num_experts,
        stage_ranks,
        nodes.ranks_per_node,
        config.zero.stage,
        steps_alone=config.zero.zeropp.sync_every != 1,
    )


def log_settings_without_effect(config: Config, axis: ExpertAxis | None) -> None:
    """Log which settings do nothing for experts that are split like this."""
    bits, reasons = config.parallel.moe_dispatch_bits, {}
    if bits < UNQUANTIZED and (axis is None or axis.across is None):
        reasons[f"--moe-dispatch-bits {bits}"] = (
            "no token crosses nodes: that needs an --expert-model-parallel-size of several nodes"
        )
    hpz = config.zero.zero_optimization.zero_hpz_partition_size
    if hpz > 1 and axis is not None and axis.mesh[AXIS_NAMES[0]].size() == 1:
        reasons[f"zero_optimization.zero_hpz_partition_size = {hpz}, for experts,"] = (
            f"each rank has its own whole, as --expert-model-parallel-size {axis.size} splits them "
            "over all ranks, so that there is nothing to copy; other weights are copied"
        )
    for line in (no_effect_line({name: why}) for name, why in reasons.items()):
        log.info("%s", line)


def expert_row(model: ModelConfig, axis: ExpertAxis | None) -> tuple[str, str]:
    """Return a row that says how many experts there are, and which ranks have them."""
    text = (
        f"{model.num_experts} in {sum(model.moe_layers)} of {model.num_layers} layers, "
        f"{model.moe_router_topk} for each token"
    )
    if axis is None:
        return "experts", text
    text += f"\n{axis.size} ranks split them, {(axis.across or axis.group).where}"
    if axis.across is not None:
        coded = f", towards experts as INT{axis.bits}" if axis.bits < UNQUANTIZED else ""
        text += f";\ntokens cross once to each node{coded}"
    return "experts", text


CAPABILITY = ExpertCapability
