"""MixZ++: frozen weights are quantized once, and are gathered as they are stored.

Parameters of fewer than two dims stay numbers.
Source: DeepSpeed's MixZ++; ZeRO++ (Wang et al. 2023), section 3.1.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from zeropp import fsdp_adapter as fsdp
from zeropp.capabilities.mixz.settings import NAME
from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.sharding import Sharding
from zeropp.wire.quantized_shard import QuantizedShard, stored_bytes

MIB = 2**20
log = logging.getLogger("zeropp")


class FrozenShard(QuantizedShard):
    """A shard of a frozen weight."""

    setting = NAME


def store(
    sharding: Sharding, config: ZeroConfig, meta_device: torch.device | None = None
) -> Sharding:
    """Quantize the frozen weights of two and more dims in place, once.

    Weights on the meta device get memory for codes on `meta_device`. Raises InputError if nothing
    is frozen, and for frozen weights on the meta device if `meta_device` is None.
    """
    bits = config.placement.frozen_bits
    quantize_frozen(sharding.units, bits, meta_device)
    num_bytes, elements = stored_bytes(sharding.model)
    if all(parameter.requires_grad for parameter in sharding.model.parameters()):
        raise InputError(
            f"{NAME} stores frozen weights quantized, but all weights are trained: freeze some "
            "(requires_grad_(False)), as LoRA does, or leave it out"
        )
    sharding.weights_changed()
    log.info(
        f"MixZ++: {elements:,} frozen weights of this rank are stored as INT{bits}, "
        f"{num_bytes / MIB:.1f} MiB ({2 * elements / MIB:.1f} in bf16)"
    )
    return replace(sharding, plan=sharding.plan.with_specs_of(sharding.units))


def quantize_frozen(
    units: Sequence[fsdp.FSDPModule], bits: int, room: torch.device | None = None
) -> None:
    """Store the units' frozen weights of two and more dims as INT8 or INT4.

    Those that are stored so already stay. Weights of the meta device have nothing to quantize yet:
    they get memory for codes on the device `room`; without one they raise InputError.
    """
    for unit in units:
        for shard in fsdp.own_shards(unit):
            spec, local = shard.spec, shard.local.detach()
            if spec.trainable or spec.ndim < 2 or isinstance(local, QuantizedShard):
                continue
            if not local.is_meta:
                fsdp.store(shard, FrozenShard.of(local, spec.elements, bits))
            elif room is not None:
                fsdp.store(shard, FrozenShard.zeros(local, spec.elements, bits, room))
            else:
                raise InputError(
                    "frozen weights have no values yet, and quantizing would keep none: load them "
                    "first"
                )
