"""Build a rank's sharded, initialized model and its optimizer from a configuration.

The model is built on the meta device, sharded, allocated, and then filled shard by shard: no rank
ever holds more than its shards and one block.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron_zpp.model.attention.attention import QK_NORMS
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.part import TORCH_NORMS, Execution, Part, parts_of_stages
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.apex import Apex, ApexAdam
from megatron_zpp.recipe.capability import Capability, OwnGroup, capabilities_of, extended
from megatron_zpp.recipe.pipeline import joined
from megatron_zpp.settings.config import Config, OptimizerConfig
from zeropp import Sharding, ZeroConfig, shard
from zeropp.optim import fastest_adamw
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


class _Group(NamedTuple):
    """What parameters of a group have in common; groups are in this order."""

    is_embedding: bool
    no_decay: bool
    is_adams: bool  # where others are of the capability's own group


def build_optimizer(
    sharding: Sharding,
    config: OptimizerConfig,
    device: torch.device,
    apex: Apex | None,
    capabilities: Sequence[Capability],
) -> torch.optim.Optimizer:
    """Build a capability's optimizer if one has its own, else AdamW."""
    own = next((each.own_group for each in capabilities if each.own_group), None)
    groups = parameter_groups(
        sharding.model,
        decouples_ends=config.decoupled_lr is not None,
        qk_norms_decay=config.no_weight_decay_cond_type is not None,
        own=own,
    )
    settings = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    for each in capabilities:
        optimizer = each.build_optimizer(sharding, groups, device, settings)
        if optimizer is not None:
            return optimizer
    if apex:
        return ApexAdam(apex, groups, **settings)
    return fastest_adamw(groups, **settings, torch_on_cpu=config.cpu_torch_adam)


def parameter_groups(
    model: torch.nn.Module,
    *,
    decouples_ends: bool = False,
    qk_norms_decay: bool = False,
    own: OwnGroup | None = None,
) -> list[dict]:
    """Return Megatron's groups of trained parameters: matrices decay, biases and gains do not.

    With `decouples_ends`, the token embedding and the output layer are a group of their own. With
    `qk_norms_decay`, what normalizes queries and keys decays too. With `own`, groups say by its key
    whether they have its parameters.
    """
    layers = (getattr(model, name, None) for name in ("tokens", "head"))
    embeddings = [layer.weight for layer in layers if layer is not None]
    groups: dict[_Group, list] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_embedding = decouples_ends and any(parameter is each for each in embeddings)
            is_qk_norm = not QK_NORMS.isdisjoint(name.split("."))
            decays = parameter.ndim >= 2 or (qk_norms_decay and is_qk_norm)
            is_adams = own is None or not own.has(name, parameter)
            group = _Group(is_embedding, no_decay=not decays, is_adams=is_adams)
            groups.setdefault(group, []).append(parameter)
    return [
        {"params": groups[key], "decays": not key.no_decay, "at_ends": key.is_embedding}
        | ({own.key: not key.is_adams} if own else {})
        for key in sorted(groups)
    ]
