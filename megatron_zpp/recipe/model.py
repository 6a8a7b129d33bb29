"""Build the sharded, initialized model from a configuration.

The model is built on the meta device, sharded, allocated, and then filled shard by shard: no rank
ever holds more than its shards and one block.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from megatron_zpp.model.execution import Execution
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.moe.experts import Experts
from megatron_zpp.model.part import TORCH_NORMS, Part, parts_of_stages
from megatron_zpp.parallel.expert_axis import AXIS_NAMES, ExpertAxis
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.rank_grid import RankGrid
from megatron_zpp.recipe.apex import Apex
from megatron_zpp.recipe.capability import Capability, extended
from megatron_zpp.recipe.expert_ranks import expert_ranks
from megatron_zpp.recipe.pipeline import Pipeline
from megatron_zpp.settings.config import Config
from zeropp import Sharding, shard
from zeropp.settings.schema import no_effect_line
from zeropp.sharding.shard import allocate_parameters
from zeropp.wire.route import UNQUANTIZED

COMPILER = "inductor"

log = logging.getLogger("megatron_zpp")


def build_model(
    config: Config,
    vocab_size: int,
    ranks: Ranks,
    apex: Apex | None,
    fill: Callable[[torch.nn.Module], None] | None = None,
    capabilities: Sequence[Capability] = (),
) -> Sharding:
    """Build the GPT of `config.model`, sharded over `ranks` as `config.zero` says.

    `fill` writes the weights; without it they are drawn. Capabilities may extend the model.
    Returns what `zeropp.shard` returns; of a pipeline, for this rank's stages.
    """
    experts, seed, shape = None, config.training.seed, config.model
    if shape.has_experts:
        experts = expert_axis(config, ranks)
        log_settings_without_effect(config, experts)
    common = Part(
        tensor=ranks.tensor_axis(config.parallel),
        context=ranks.context_axis(config.parallel),
        experts=experts,
        execution=Execution(config.recompute, COMPILER if config.training.compile else None),
        norms=apex.norms if apex else TORCH_NORMS,
    )
    with torch.device("meta"):
        whole = extended(GPT(shape, vocab_size, common), config)
    if ranks.pipeline_size > 1:
        sharding = _build_pipeline(config, ranks, whole, capabilities)
    else:
        sharding = _shard_model(whole, config, ranks)
    for each in capabilities:
        each.before_allocation(sharding, ranks.device)
    sharding = allocate_parameters(sharding, config.zero, ranks.device)
    model = sharding.model
    if fill is None:
        initialize(model, seed, shape)
    else:
        fill(model)
        for each in capabilities:
            each.initialize(model)
    sharding.weights_changed()
    return sharding


def expert_axis(config: Config, ranks: RankGrid) -> ExpertAxis | None:
    """Return the axis over which ranks split experts, if they do; all ranks of a run call it.

    Raises InputError for a --expert-model-parallel-size that does not fit.
    """
    size = expert_ranks(config, ranks.nodes)
    return ranks.expert_axis(size, config.parallel.moe_dispatch_bits)


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


def _build_pipeline(
    config: Config, ranks: Ranks, whole: GPT, capabilities: Sequence[Capability]
) -> Sharding:
    """Build and shard this rank's stages of a model."""
    layers = config.parallel.stages(config.model.num_layers)
    for each in capabilities:
        each.require_stages(whole, layers)
    stages, at_both_ends = [], []
    for part in parts_of_stages(whole.part, layers, ranks.pipeline_place, ranks.pipeline_size):
        with torch.device("meta"):
            model = extended(GPT(config.model, whole.vocab_size, part), config)
        if whole.head is None and model.tokens is not None:
            at_both_ends.append(model.tokens)
        stages.append(_shard_model(model, config, ranks, keeps_root=True))
    is_fp32 = config.model.fp32_residual_connection
    dtype = torch.float32 if is_fp32 else stages[0].compute_dtype
    splits_rows = config.parallel.sequence_parallel
    pipeline = Pipeline(whole, stages, ranks, dtype, splits_rows=splits_rows)
    return Sharding.join(pipeline, stages, at_both_ends=at_both_ends)


def _shard_model(model: GPT, config: Config, ranks: Ranks, *, keeps_root: bool = False) -> Sharding:
    """Shard a model that is on the meta device over the data axis."""
    axis = model.part.experts
    experts = [module for module in model.modules() if isinstance(module, Experts) and axis]
    # Blocks cast their own inputs, as the residual may be fp32 (--fp32-residual-connection).
    return shard(
        model,
        ranks.mesh,
        config.zero,
        axis="data",
        experts={module: axis.mesh for module in experts},
        cast_forward_inputs=False,
        keeps_root=keeps_root,
        calls_units=True,
    )
