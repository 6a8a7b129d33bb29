"""Build the sharded, initialized model from a configuration.

The model is built on the meta device, sharded, allocated, and then filled shard by shard: no rank
ever holds more than its shards and one block.
"""

from collections.abc import Callable, Sequence

import torch

from megatron_zpp.model.execution import Execution
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.part import TORCH_NORMS, Part, parts_of_stages
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.apex import Apex
from megatron_zpp.recipe.capability import Capability, capabilities_of, extended
from megatron_zpp.recipe.pipeline import joined
from megatron_zpp.settings.config import Config
from zeropp import Sharding, ZeroConfig, shard
from zeropp.sharding import allocate_parameters

COMPILER = "inductor"


def build_model(
    config: Config,
    vocab_size: int,
    ranks: Ranks,
    apex: Apex | None,
    fill: Callable[[torch.nn.Module], None] | None = None,
    capabilities: Sequence[Capability] | None = None,
) -> Sharding:
    """Build the GPT of `config.model`, sharded over `ranks` as `config.zero` says.

    `fill` writes the weights; without it they are drawn. `capabilities`, by default new ones, may
    add to the model. Returns what `zeropp.shard` returns; of a pipeline, for this rank's stages.
    """
    seed, shape, zero = config.training.seed, config.model, config.zero
    if capabilities is None:
        capabilities = capabilities_of(config, ranks)
    common = Part(
        axes={each.splits: each.axis() for each in capabilities if each.splits},
        execution=Execution(config.recompute, COMPILER if config.training.compile else None),
        norms=apex.norms if apex else TORCH_NORMS,
    ).over(ranks, config.parallel)

    def build(part: Part) -> GPT:
        with torch.device("meta"):
            return extended(GPT(shape, vocab_size, part), capabilities)

    whole = build(common)
    if ranks.pipeline_size == 1:
        sharding = _shard_model(whole, zero, ranks)
    else:
        layers = config.parallel.stages(shape.num_layers)
        for each in capabilities:
            each.require_stages(whole, layers)
        parts = parts_of_stages(whole.part, layers, ranks.pipeline_rank, ranks.pipeline_size)
        stages = (_shard_model(build(part), zero, ranks, keeps_root=True) for part in parts)
        sharding = joined(whole, tuple(stages), ranks)
    for each in capabilities:
        each.before_allocation(sharding, ranks.device)
    sharding = allocate_parameters(sharding, zero, ranks.device)
    model = sharding.model
    if fill is None:
        initialize(model, seed, shape)
    else:
        fill(model)
        for each in capabilities:
            each.initialize(model)
    sharding.weights_changed()
    return sharding


def _shard_model(
    model: GPT, zero: ZeroConfig, ranks: Ranks, *, keeps_root: bool = False
) -> Sharding:
    """Shard a model that is on the meta device over the data axis."""
    axes = {module: getattr(module, "own_axis", None) for module in model.modules()}
    # Blocks cast their own inputs, as the residual may be fp32 (--fp32-residual-connection).
    return shard(
        model,
        ranks.mesh,
        zero,
        axis="data",
        experts={module: axis.mesh for module, axis in axes.items() if axis is not None},
        cast_forward_inputs=False,
        keeps_root=keeps_root,
        calls_units=True,
    )
