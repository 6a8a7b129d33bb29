"""The configurations that an emulated cluster compares: the same GPT, weights, tokens and AdamW.

| name           | weights travel as                | gradients travel as                         |
|----------------|----------------------------------|---------------------------------------------|
| `fsdp2`        | bf16; plain `fully_shard`        | bf16; plain `fully_shard`                   |
| `zero3`        | bf16                             | bf16, two hops                              |
| `qwz`          | INT8                             | as `zero3`                                  |
| `hpz`          | bf16; across nodes once per step | as `zero3`                                  |
| `qgz`          | as `zero3`                       | INT8 in a node, INT4 across nodes           |
| `zeropp`       | INT8; across nodes once per step | as `qgz`                                    |
| `zeropp-4-4`   | as `zeropp`                      | INT4 on both hops                           |
| `deepspeed`    | bf16; DeepSpeed's ZeRO-3         | bf16; DeepSpeed's ZeRO-3                    |
| `lora-zero3`   | as `zero3`, all but adapters frozen | of the adapters, as `zero3`              |
| `mixz`         | frozen ones as stored, INT8      | as `lora-zero3`                             |
| `mixz-hpz`     | the same; frozen ones once       | as `lora-zero3`                             |

No gradient is clipped and no norm is taken, so that nothing but weights and gradients travels.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from benchmarks.cluster.deepspeed_peer import deepspeed_step
from benchmarks.shared.setting import Setting
from benchmarks.step.contestants import fsdp2, steps_of
from megatron_zpp.data.loader import Batch
from megatron_zpp.parallel.recipe import build_model, build_optimizer
from megatron_zpp.settings.config import LoraConfig
from zeropp import Sharding, ZeroConfig
from zeropp.optim.step import local_part
from zeropp.wire.frozen_weights import stored_bytes

QWZ = MappingProxyType({"zero_quantized_weights": True})
QGZ = MappingProxyType({"zero_quantized_gradients": True})
HPZ = MappingProxyType({"zero_hpz_partition_size": "ranks per node"})
OURS: Mapping[str, tuple[Mapping, Mapping]] = MappingProxyType(
    {  # name -> keys of "zero_optimization", keys of "zeropp"
        "zero3": ({}, {}),
        "qwz": (QWZ, {}),
        "hpz": (HPZ, {}),
        "qgz": (QGZ, {}),
        "zeropp": ({**QWZ, **HPZ, **QGZ}, {}),
        "zeropp-4-4": ({**QWZ, **HPZ, **QGZ}, {"gradient_bits": [4, 4]}),
    }
)
STORED = MappingProxyType({"zero_quantized_nontrainable_weights": True})
LORA: Mapping[str, tuple[Mapping, Mapping]] = MappingProxyType(
    {"lora-zero3": ({}, {}), "mixz": (STORED, {}), "mixz-hpz": ({**STORED, **HPZ}, {})}
)
ADAPTERS = LoraConfig(lora_rank=8, pretrained_checkpoint="none: the weights are drawn")
FSDP2, DEEPSPEED = "fsdp2", "deepspeed"
NAMES = (FSDP2, *OURS, DEEPSPEED)
DIFFERENT_STEPS = 4  # steps with batches of their own, again and again: the loss falls

Sent = Mapping[tuple[str, str], float]  # (purpose, hop) -> bytes


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model in training: one step returns this rank's loss; what the ledger counted, if any."""

    step: Callable[[], float]
    take: Callable[[], Sent | None] = lambda: None  # bytes sent since it was last called
    expected: Sent | None = None  # bytes of a step, by the formula
    look: Callable[[], float] | None = None  # a pass without gradients, as step else
    parameters: int
    held: int = 0  # bytes of this rank's frozen matrices


def trainee(name: str, setting: Setting, ranks_per_node: int) -> Trainee:
    """Build a configuration by its name; raises InputError for what ours refuses."""
    micro_batches = dict(setting.shape)["micro-batches"]
    batches = setting.batches(DIFFERENT_STEPS)
    feed = itertools.cycle(list(steps_of(batches, micro_batches)))
    if name == DEEPSPEED:
        step, parameters = deepspeed_step(setting, feed)
        return Trainee(step=step, parameters=parameters)
    if name == FSDP2:
        peer = fsdp2(setting, name, iter(()))
        step = _plain_step(peer.model, peer.optimizer, feed)
        return Trainee(step=step, parameters=peer.model.num_parameters())
    config = replace(setting.config, zero=zero_config(name, ranks_per_node))
    if name in LORA:
        config = replace(config, lora=ADAPTERS)
    sharding = build_model(config, setting.vocab_size, setting.ranks, apex=None)
    optimizer = build_optimizer(sharding, config, setting.ranks.device, apex=None)
    return Trainee(
        step=_plain_step(sharding.model, optimizer, feed, sharding),
        look=_forward_only(sharding, feed),
        held=_frozen_bytes(sharding),
        take=sharding.traffic.take,
        expected=sharding.expected_traffic(micro_batches),
        parameters=sharding.model.num_parameters(),
    )


def zero_config(name: str, ranks_per_node: int) -> ZeroConfig:
    """The JSON of one of our configurations, read."""
    keys, zeropp = {**OURS, **LORA}[name]
    values = {key: ranks_per_node if value == "ranks per node" else value
              for key, value in keys.items()}
    json = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **values},
        "zeropp": {"ranks_per_node": ranks_per_node, **zeropp},
    }
    return ZeroConfig.from_json(json)


def _forward_only(sharding: Sharding, feed: Iterator[Sequence[Batch]]) -> Callable[[], float]:
    @torch.no_grad()
    def look() -> float:
        batch = next(feed)[0]
        loss = sharding.model(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
        sharding.release()
        return float(loss)

    return look


def _frozen_bytes(sharding: Sharding) -> int:
    """Of this rank: codes where they are stored so, else what bf16 would take."""
    frozen = [p for p in sharding.model.parameters() if not p.requires_grad and p.ndim >= 2]
    stored, _ = stored_bytes(sharding.model)
    return stored or sum(2 * local_part(one).numel() for one in frozen)


def _plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    feed: Iterator[Sequence[Batch]],
    sharding: Sharding | None = None,
) -> Callable[[], float]:
    def around(last: bool) -> AbstractContextManager:
        return sharding.micro_step(last=last) if sharding else nullcontext()

    def step() -> float:
        total, batches = 0.0, next(feed)
        for index, batch in enumerate(batches):
            with around(index == len(batches) - 1):
                loss = model(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
                (loss / len(batches)).backward()
            total += loss.detach() / len(batches)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step
