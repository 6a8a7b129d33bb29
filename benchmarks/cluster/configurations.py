"""The configurations that an emulated cluster compares: the same GPT, weights, tokens and AdamW.

`fsdp2` is plain `fully_shard`; `fsdp2-ring` the same with a reduce-scatter that sends what NCCL's
sends, half of gloo's; `attach` the first with all of ZeRO++ by `zeropp.attach`, all in bf16. The
others are those of benchmarks/shared/zero_json.toml; in the last three, only LoRA's adapters are
trained, of rank 8 or as flags say. In front of the others stand the
sizes of axes that split the model: `tp2-zeropp`, `pp2-zero1`, `pp2-tp2-zero3`, `cp2-zeropp`.
`ep2-zeropp` and `ep4-fsdp2` say how many ranks split the experts of a mixture. All compute the same
batches.

No gradient is clipped and no norm is taken, so that nothing but weights and gradients travels.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.cluster.peers.fsdp2_experts import fsdp2_experts
from benchmarks.cluster.peers.ring_reduce_scatter import RingReduceScatter
from benchmarks.shared.pretrain_run import cpu_ranks
from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.shared.zero_json import LORA, OURS, zero_json
from benchmarks.step.training_loops import Steps, accumulate, adamw, fsdp2, model_loss_of
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.recipe.activation_forecast import activation_traffic
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.recipe.model import build_model, build_optimizer
from megatron_zpp.recipe.pipeline import Pipeline
from zeropp import Sharding, ZeroConfig, attach
from zeropp.optim.step_or_skip import local_part
from zeropp.wire.quantized_shard import stored_bytes

AXES = MappingProxyType(
    {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "cp": "--context-parallel-size",
        "ep": "--expert-model-parallel-size",
    }
)
ADAPTERS = LoraConfig(lora_rank=8, pretrained_checkpoint="none: the weights are drawn")
FSDP2, FSDP2_RING, ATTACH = "fsdp2", "fsdp2-ring", "attach"
NAMES = (FSDP2, FSDP2_RING, ATTACH, *OURS)
STEPS_OF_TEXT = 512  # before the text begins again

Sent = Mapping[tuple[str, str], float]  # (purpose, hop) -> bytes


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A model in training on this rank."""

    # One training step; returns this rank's loss, None where another stage of a pipeline has it.
    step: Callable[[], float | None]
    forward: Callable[[], float] | None = None  # one pass without gradients, likewise
    parameters: int
    take_sent: Callable[[], Sent | None] = lambda: None  # bytes sent since the last call
    expected: Sent | None = None  # bytes of a step by the formula
    held: int = 0  # bytes of this rank's frozen matrices


def build_configuration(name: str, setup: TrainingSetup, ranks_per_node: int) -> Configuration:
    """Build a configuration by its name; raises InputError for what zeropp refuses."""
    sizes, zero_name = axes_of(name)
    if sizes:
        setup = _divided_setup(setup, sizes)
    steps = itertools.cycle(setup.steps_of_text(STEPS_OF_TEXT))
    if zero_name in (FSDP2, FSDP2_RING, ATTACH):
        if setup.config.model.has_experts:
            model = fsdp2_experts(setup)
            optimizer = adamw(model.parameters())
        else:
            loop = fsdp2(setup, name, iter(()))
            model, optimizer = loop.model, loop.optimizer
        step = _unclipped_step(model, optimizer, steps)
        plain = Configuration(step=step, parameters=model.num_parameters())
        if zero_name == FSDP2_RING:
            for unit in (each for each in model.modules() if isinstance(each, FSDPModule)):
                unit.set_custom_reduce_scatter(RingReduceScatter())
        if zero_name != ATTACH:
            return plain
        attached = attach(model, zero_config("zeropp", ranks_per_node))
        return replace(
            plain,
            take_sent=attached.traffic.take,
            expected=attached.expected_traffic(setup.micro_batches),
        )
    config = replace(setup.config, zero=zero_config(zero_name, ranks_per_node))
    asked_for = config.lora if config.lora.lora_rank else ADAPTERS
    config = replace(config, lora=asked_for if zero_name in LORA else LoraConfig())
    ranks, count = setup.ranks, setup.micro_batches
    sharding = build_model(config, setup.vocab_size, ranks, apex=None)
    own = capabilities_of(config, ranks)
    optimizer = build_optimizer(sharding, config.optimizer, ranks.device, None, own)
    if isinstance(sharding.model, Pipeline):
        step = _pipeline_step(sharding.model, optimizer, steps, count)
    else:
        step = _unclipped_step(sharding.model, optimizer, steps, sharding)
    return Configuration(
        step=step,
        forward=None if sizes else _forward_only(sharding, steps),
        parameters=sharding.model.num_parameters(),
        take_sent=lambda: {**sharding.traffic.take(), **ranks.activations.take()},
        expected={
            **sharding.expected_traffic(count),
            **dict.fromkeys(ranks.activations.sent, 0),
            **activation_traffic(sharding, ranks, config.batch.micro_batch_size, count),
        },
        held=_frozen_bytes(sharding),
    )


def axes_of(name: str) -> tuple[dict[str, int], str]:
    """Split a name into the sizes of axes, by the first letters of `AXES`, and the rest."""
    sizes: dict[str, int] = {}
    while match := re.match(rf"({'|'.join(AXES)})(\d+)-", name):
        sizes[match[1]], name = int(match[2]), name[match.end() :]
    return sizes, name


def zero_config(name: str, ranks_per_node: int) -> ZeroConfig:
    """The settings of one of our configurations."""
    return ZeroConfig.from_json({"bf16": {"enabled": True}, **zero_json(name, ranks_per_node)})


def _divided_setup(setup: TrainingSetup, sizes: Mapping[str, int]) -> TrainingSetup:
    """Return the set-up of ranks that split the model along axes."""
    words = [f"{AXES[axis]} {size}" for axis, size in sizes.items()]
    setup = replace(setup, extra_flags=" ".join((setup.extra_flags, *words)))
    return replace(setup, ranks=cpu_ranks(setup.config))


def _pipeline_step(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: Steps, num_micro_batches: int
) -> Callable[[], float | None]:
    def step() -> float | None:
        samples = ((0, batch) for batch in next(steps))
        scale = 1 / num_micro_batches
        scales = [scale] * num_micro_batches
        losses = pipeline.forward_backward(samples, scales, lambda *_: None)
        pipeline.sum_tied_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(losses)) * scale if losses else None

    return step


def _unclipped_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Steps,
    sharding: Sharding | None = None,
) -> Callable[[], float]:
    loss_of = model_loss_of(model)
    contexts = () if sharding is None else (sharding.micro_step,)

    def step() -> float:
        loss = accumulate(next(steps), loss_of, *contexts)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _forward_only(sharding: Sharding, steps: Steps) -> Callable[[], float]:
    loss_of = model_loss_of(sharding.model)

    @torch.no_grad()
    def forward() -> float:
        loss = loss_of(next(steps)[0])
        sharding.release()
        return float(loss)

    return forward


def _frozen_bytes(sharding: Sharding) -> int:
    """Bytes of this rank's frozen matrices: as stored in INT8, else what bf16 would take."""
    stored, _ = stored_bytes(sharding.model)
    if stored:
        return stored
    parameters = sharding.model.parameters()
    frozen = [weight for weight in parameters if not weight.requires_grad and weight.ndim >= 2]
    return sum(2 * local_part(weight).numel() for weight in frozen)
