"""What mixtures of experts declare: their settings, and what follows from these elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.capabilities.experts.model_settings import NEEDS_EXPERTS, MoeConfig
from megatron_zpp.capabilities.experts.parallel_settings import ExpertParallelConfig
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.settings.gpt.layer_pattern import marks_of
from megatron_zpp.settings.gpt.sizes import SizeConfig
from zeropp.errors import InputError
from zeropp.settings.schema import settings_of


@dataclass(frozen=True, kw_only=True)
class ExpertFlags(Section):
    """A switch of Megatron-DeepSpeed's (of ModelFlags)"""

    expert_interval: int | None = flag(
        None,
        "experts in every N-th layer, counted from 1, instead of --moe-layer-freq",
        minimum=1,
        no_effect=NEEDS_EXPERTS,
    )


_OF_MODEL = (*settings_of(MoeConfig), *settings_of(ExpertFlags))
_OF_RANKS = settings_of(ExpertParallelConfig)


def without_unused(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values without those of experts if the model is dense, and layers by --expert-interval.

    Raises InputError for flags of experts without --num-experts.
    """
    if values.get("pretrained_checkpoint") or values.get("use_checkpoint_args"):
        return values
    given = [entry for entry in _OF_MODEL if entry.name in values]
    if values.get("num_experts", 1) > 1:
        return {**values, **_expert_layers(values)}
    if given and "num_experts" not in values:
        shown = ", ".join(entry.assignment(values[entry.name]) for entry in given)
        raise InputError(
            f"{shown}: how many experts are there? Give --num-experts, or 1 for a dense model"
        )
    names = {entry.name for entry in (*given, *_OF_RANKS)}
    return {name: value for name, value in values.items() if name not in names}


def _expert_layers(values: Mapping[str, Any]) -> dict[str, str]:
    """What --expert-interval, as Megatron-DeepSpeed counts, says of the layers with experts."""
    interval = values.get("expert_interval")
    if interval is None:
        return {}
    if "moe_layer_freq" in values:
        raise InputError(
            f"--expert-interval {interval} and --moe-layer-freq {values['moe_layer_freq']} both "
            "say which layers have experts: give one"
        )
    marks = marks_of(
        str(interval),
        values.get("num_layers", SizeConfig.setting("num_layers").default),
        "--expert-interval",
    )
    return {"moe_layer_freq": str(list(map(int, marks))).replace(" ", "")}


def step_key(config: Any) -> dict[str, Any]:
    """Return on which of these settings the time of a step depends, if there are experts.

    The configuration says how many ranks split them.
    """
    model = config.model
    if not model.has_experts:
        return {}
    return {
        "expert_ranks": config.parallel.expert_model_parallel_size,
        "experts": [model.num_experts, model.moe_router_topk, model.expert_ffn_size],
        "moe_layers": sum(model.moe_layers),
        "shared_ffn": model.moe_shared_expert_intermediate_size,
    }


MODEL, MODEL_FLAGS, PARALLEL = (MoeConfig,), (ExpertFlags,), (ExpertParallelConfig,)
TOPICS = {"experts": MoeConfig}  # of --help
SIZES = ("expert_model_parallel_size",)
BEFORE_DEFAULTS = (without_unused,)
STEP_KEYS = (step_key,)
NOT_ARCHITECTURE = ("moe_router_dtype",)
OF_FINE_TUNING = (
    *("moe_router_topk", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_group_best"),
)
OBSTACLES = {
    "expert_parallel.autoep_size = {config.zero.expert_ranks} is for models of "
    "zeropp.initialize: leave the section out, and give --expert-model-parallel-size": (
        lambda c: c.zero.expert_ranks > 1
    )
}
