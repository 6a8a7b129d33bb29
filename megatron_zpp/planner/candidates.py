"""The settings that a plan compares: stages, quantization, micro-batches and recomputation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.config import Config
from megatron_zpp.settings.schedule import Schedules
from zeropp.settings.zero_config import ZeroConfig

LARGEST_MICRO_BATCH = 64  # samples
RECOMPUTED = MappingProxyType({"none": None, "attention": "selective", "all": "full"})


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Settings of ZeRO: keys of the JSON's `zero_optimization` and `zeropp`.

    inexactness: 0 for what computes as unquantized training does, larger for fewer bits.
    """

    name: str
    inexactness: int
    zero: Mapping[str, Any]
    zeropp: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the part of a DeepSpeed JSON that asks for these settings."""
        keys = {"zero_optimization": dict(self.zero)}
        return keys | ({"zeropp": dict(self.zeropp)} if self.zeropp else {})


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration of a run; `config` is complete."""

    settings: ZeroSettings
    micro_batch: int
    recomputed: str  # a key of `RECOMPUTED`
    config: Config


def all_settings(num_nodes: int, ranks_per_node: int) -> list[ZeroSettings]:
    """Return the settings of ZeRO that are worth comparing on such nodes."""
    if num_nodes * ranks_per_node == 1:
        return [ZeroSettings(name="stage 0", inexactness=0, zero={"stage": 0})]
    qwz, qgz = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
    once = {"reduce_gradients_once": True}
    result = [ZeroSettings(name="stage 0", inexactness=0, zero={"stage": 0})]
    for stage in (1, 2, 3):
        base = {"stage": stage}
        result += [
            ZeroSettings(name=f"stage {stage}", inexactness=0, zero=base),
            ZeroSettings(name=f"stage {stage}, qwZ", inexactness=1, zero=base | qwz),
            ZeroSettings(name=f"stage {stage}, qgZ", inexactness=2, zero=base | qgz),
            ZeroSettings(name=f"stage {stage}, qwZ qgZ", inexactness=3, zero=base | qwz | qgz),
        ]
    stage_3 = {"stage": 3}
    result.append(
        ZeroSettings(name="stage 3, gradients once", inexactness=0, zero=stage_3, zeropp=once)
    )
    return result + (_with_hpz(ranks_per_node) if num_nodes > 1 and ranks_per_node > 1 else [])


def _with_hpz(ranks_per_node: int) -> list[ZeroSettings]:
    qwz, qgz = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
    hpz = {"stage": 3, "zero_hpz_partition_size": ranks_per_node}
    every, once = hpz | qwz | qgz, {"reduce_gradients_once": True}
    steps = {"weight_steps": True, "weight_step_levels": 5}
    rows = (
        ("hpZ", 0, hpz, {}),
        ("hpZ, gradients once", 0, hpz, once),
        ("qwZ hpZ", 1, hpz | qwz, {}),
        ("hpZ qgZ", 2, hpz | qgz, {}),
        ("qwZ hpZ qgZ", 3, every, {}),
        ("qwZ hpZ qgZ, gradients once", 3, every, once),
        ("qwZ hpZ qgZ, INT4 in the node too", 4, every, {"gradient_bits": (4, 4)}),
        ("qwZ hpZ qgZ, steps of codes", 5, every, steps),
        ("qwZ hpZ qgZ, steps of codes, INT3", 6, every, steps | {"gradient_bits": (8, 3)}),
        (
            "qwZ hpZ qgZ, steps of codes, INT3, gradients once",
            6, every, steps | once | {"gradient_bits": (8, 3)},
        ),
    )  # fmt: skip
    return [
        ZeroSettings(name=f"stage 3, {name}", inexactness=inexactness, zero=zero, zeropp=zeropp)
        for name, inexactness, zero, zeropp in rows
    ]


def given_settings(zero: ZeroConfig) -> ZeroSettings:
    """Return the settings of ZeRO that the flags and the JSON ask for."""
    optimization = zero.zero_optimization
    parts = [f"stage {zero.stage} as given"]
    parts += ["qwZ"] * optimization.zero_quantized_weights
    parts += ["hpZ"] * (optimization.zero_hpz_partition_size > 1)
    parts += ["qgZ"] * optimization.zero_quantized_gradients
    inexactness = optimization.zero_quantized_weights + 2 * optimization.zero_quantized_gradients
    return ZeroSettings(name=", ".join(parts), inexactness=inexactness, zero={})


def candidates_of(base: Config, settings: ZeroSettings, num_replicas: int) -> Iterator[Candidate]:
    """Yield `base` with other settings, with every micro-batch and recomputation.

    The global batch stays. Micro-batches ascend, so that what follows one that does not fit in
    memory need not be looked at.
    """
    share = Schedules.of(base).batch_size.final // num_replicas
    sizes = [size for size in range(1, LARGEST_MICRO_BATCH + 1) if share % size == 0]
    for recomputed, granularity in RECOMPUTED.items():
        recompute = replace(
            base.recompute,
            recompute_granularity=granularity,
            recompute_method="uniform" if granularity == "full" else None,
            recompute_num_layers=1,
        )
        for size in (each for each in sizes if each & (each - 1) == 0):
            zero = _with_settings(base.zero, settings, size, share // size)
            batch = replace(base.batch, micro_batch_size=size)
            config = replace(base, zero=zero, recompute=recompute, batch=batch)
            yield Candidate(
                settings=settings, micro_batch=size, recomputed=recomputed, config=config
            )


def given_candidate(base: Config) -> Candidate:
    """Return the configuration that the flags ask for."""
    granularity = base.recompute.recompute_granularity
    names = {value: name for name, value in RECOMPUTED.items()}
    return Candidate(
        settings=given_settings(base.zero),
        micro_batch=base.batch.micro_batch_size,
        recomputed=names[granularity],
        config=base,
    )


def _with_settings(
    zero: ZeroConfig, settings: ZeroSettings, micro_batch: int, num_micro_batches: int
) -> ZeroConfig:
    plain = {
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "zero_hpz_partition_size": 1,
    }
    plain_zeropp = {
        "weight_steps": False,
        "weight_step_levels": None,
        "weight_bits": 8,
        "gradient_bits": (8, 4),
        "reduce_gradients_once": False,
    }
    sizes = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": num_micro_batches,
    }
    return replace(
        zero,
        zero_optimization=replace(zero.zero_optimization, **{**plain, **settings.zero}),
        zeropp=replace(zero.zeropp, **{**plain_zeropp, **settings.zeropp}),
        **{name: size for name, size in sizes.items() if zero.value(name) is not None},
    )
