"""The recipe: from a configuration to a sharded, initialised model, without a whole copy anywhere.

Built on the meta device, wrapped (recompute, compile), sharded, given memory, then filled shard by
shard: no rank ever holds more than its shards and one block.
"""

from collections.abc import Callable

import torch

from megatron_zpp.model.apex import Apex, ApexAdam, fuse_norms
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.lora import add_lora, initialize_adapters
from megatron_zpp.model.recompute import compile_blocks, recompute
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from zeropp import Sharding, shard
from zeropp.optim.adam import fastest_adamw
from zeropp.optim.offloaded import offloaded_adamw
from zeropp.sharding.shard import allocate_parameters


def build_model(
    config: Config,
    vocab_size: int,
    ranks: Ranks,
    apex: Apex | None,
    fill: Callable[[torch.nn.Module], None] | None = None,
) -> Sharding:
    """The GPT that `config.model` describes, sharded over `ranks` by `config.zero`.

    Its weights are drawn, or come from `fill`, with LoRA's adapters as `config.lora` says.
    """
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
        if config.lora.lora_rank:
            add_lora(model, config.lora)
    if apex:
        fuse_norms(model, apex)
    recompute(model, config.recompute)
    if config.training.compile:
        compile_blocks(model)
    # The residual stream may be fp32 (--fp32-residual-connection): blocks cast their own inputs.
    sharding = shard(model, ranks.mesh, config.zero, cast_forward_inputs=False)
    sharding = allocate_parameters(sharding, config.zero, ranks.device)
    if fill is None:
        initialize(model, config.training.seed, config.model)
    else:
        fill(model)
        initialize_adapters(model, config.training.seed)
    sharding.weights_changed()
    return sharding


def build_optimizer(
    sharding: Sharding, config: Config, device: torch.device, apex: Apex | None
) -> torch.optim.Optimizer:
    """AdamW, on the host where it is offloaded; the 16-bit weights are then moved to `device`."""
    groups, settings = parameter_groups(sharding.model), adam_settings(config)
    if config.zero.offloads_optimizer:
        return offloaded_adamw(sharding, groups, device, config.zero, **settings)
    if apex:
        return ApexAdam(apex, groups, **settings)
    return fastest_adamw(groups, **settings, torch_on_cpu=config.optimizer.cpu_torch_adam)


def parameter_groups(model: torch.nn.Module) -> list[dict]:
    """Megatron's two groups: matrices decay, biases and normalization gains do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "decays": True},
        {"params": [p for p in parameters if p.ndim < 2], "decays": False},
    ]
    return [group for group in groups if group["params"]]


def adam_settings(config: Config) -> dict:
    """What the flags say of Adam."""
    return {
        "lr": config.optimizer.lr,
        "betas": (config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        "eps": config.optimizer.adam_eps,
        "weight_decay": config.optimizer.weight_decay,
    }
