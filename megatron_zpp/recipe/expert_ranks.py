"""How many ranks split the experts of each layer, in a configuration and in words."""

from dataclasses import replace

from megatron_zpp.parallel.expert_axis import ExpertAxis
from megatron_zpp.settings.config import Config, ModelConfig
from zeropp.wire.rank_group import Nodes
from zeropp.wire.route import UNQUANTIZED


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


def with_expert_ranks(config: Config, nodes: Nodes) -> Config:
    """Return a configuration that says how many ranks split experts, if there are any.

    Raises InputError for a --expert-model-parallel-size that does not fit.
    """
    if not config.model.has_experts:
        return config
    size = expert_ranks(config, nodes)
    return replace(config, parallel=replace(config.parallel, expert_model_parallel_size=size))


def expert_rows(model: ModelConfig, axis: ExpertAxis | None) -> list[tuple[str, str]]:
    """Return a row that says how many experts there are, and which ranks have them."""
    text = (
        f"{model.num_experts} in {sum(model.moe_layers)} of {model.num_layers} layers, "
        f"{model.moe_router_topk} for each token"
    )
    if axis is None:
        return [("experts", text)]
    text += f"\n{axis.size} ranks split them, {(axis.across or axis.group).where}"
    if axis.across is not None:
        coded = f", towards experts as INT{axis.bits}" if axis.bits < UNQUANTIZED else ""
        text += f";\ntokens cross once to each node{coded}"
    return [("experts", text)]
