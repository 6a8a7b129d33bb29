"""Mixtures of experts: their sizes, how tokens choose them, and how the load is balanced.

The names are Megatron-LM's flags; further names of a flag are Megatron-DeepSpeed's. A model whose
`--num-experts` is 0 or 1 is dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_zpp.settings.flag import Section, flag, flags_in, needs
from megatron_zpp.settings.gpt.layer_pattern import QUOTED, marks_of
from megatron_zpp.settings.gpt.sizes import PRETRAINED, SizeConfig
from zeropp.errors import InputError
from zeropp.settings import Rule, at_most, requires, settings_of

NO_LOSS = "none"
AUXILIARY_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_BALANCE = "use aux_loss, seq_aux_loss or global_aux_loss with --moe-aux-loss-coeff"
_NOT_BALANCED_SO = MappingProxyType(
    {
        "sinkhorn": f"experts are not assigned by Sinkhorn's iteration: {_BALANCE}",
        "quantile_balancing": (
            f"there are no thresholds by quantiles: {_BALANCE}, or --moe-router-enable-expert-bias"
        ),
    }
)


def _is_elsewhere(config: Any) -> bool:
    """Whether a checkpoint describes the model."""
    return bool(config.pretrained_checkpoint or config.checkpoint.use_checkpoint_args)


NEEDS_EXPERTS = needs("--num-experts above 1", lambda c: _is_elsewhere(c) or c.model.has_experts)
_CONDITIONS = {
    "--num-experts above 1": lambda c: _is_elsewhere(c) or c.model.has_experts,
    "--moe-shared-expert-intermediate-size": lambda c: (
        _is_elsewhere(c) or c.model.moe_shared_expert_intermediate_size
    ),
    "--moe-router-enable-expert-bias": lambda c: (
        _is_elsewhere(c) or c.model.moe_router_enable_expert_bias
    ),
    "--moe-router-num-groups": lambda c: _is_elsewhere(c) or c.model.moe_router_num_groups,
    "--moe-router-score-function softmax": lambda c: (
        _is_elsewhere(c) or c.model.moe_router_score_function == "softmax"
    ),
    "the model is dense": NEEDS_EXPERTS.when,
    "experts take any number of rows, and padding would not change them": None,
}
_flag = flags_in("model_flags.toml", _CONDITIONS, package=__package__)
_model_flag = partial(_flag, no_effect=PRETRAINED)  # which a checkpoint knows


@dataclass(frozen=True, kw_only=True)
class MoeConfig(Section):
    """Mixtures of experts: sizes, the router, losses that balance the load (of ModelConfig)"""

    marked_by: ClassVar[str] = "has_experts"  # by what a model says that it uses these

    num_experts: int | None = _model_flag(None)
    moe_layer_freq: str = _model_flag("1")
    moe_ffn_hidden_size: int | None = _model_flag(None)
    moe_shared_expert_intermediate_size: int | None = _model_flag(None)
    moe_shared_expert_gate: bool = _model_flag(False)
    moe_router_topk: int = _model_flag(2)
    moe_router_topk_scaling_factor: float | None = _model_flag(None)
    moe_router_score_function: str = _model_flag("softmax")
    moe_router_pre_softmax: bool = _model_flag(False)
    moe_router_num_groups: int | None = _model_flag(None)
    moe_router_group_topk: int | None = _model_flag(None)
    moe_router_group_best: int | None = _model_flag(None)
    moe_router_enable_expert_bias: bool = _model_flag(False)
    moe_router_bias_update_rate: float = _flag(1e-3)
    moe_router_dtype: str | None = _model_flag(None)
    moe_router_load_balancing_type: tuple[str, ...] = _flag(
        ("aux_loss",), choices=(*AUXILIARY_LOSSES, NO_LOSS), refused=_NOT_BALANCED_SO
    )
    moe_router_force_load_balancing: bool = _flag(False)
    moe_aux_loss_coeff: tuple[float, ...] = _flag((0.0,))
    moe_z_loss_coeff: float | None = _flag(None)
    moe_input_jitter_eps: float | None = _flag(None)
    moe_expert_capacity_factor: float | None = _flag(None)
    moe_eval_capacity_factor: float | None = _flag(None)
    moe_min_capacity: int = _flag(0)
    moe_token_drop_policy: str = _flag("probs")
    moe_pad_expert_input_to_capacity: bool = _flag(False)
    disable_moe_token_dropping: bool = _flag(False)
    moe_per_layer_logging: bool = _flag(False)

    rules = (
        Rule(
            ("moe_router_topk", "num_experts"),
            lambda k, experts: (experts or 0) > 1 and k > experts,
            "{} is more than {}: a token cannot pass more experts than there are; lower the first",
        ),
        Rule(
            ("num_experts", "moe_router_num_groups"),
            lambda experts, groups: groups and experts and experts % groups,
            "{} is not divisible by {}: groups have equally many experts",
        ),
        requires(
            "moe_router_num_groups",
            "moe_router_group_topk",
            "{} needs --moe-router-group-topk: say how many of them a token chooses",
        ),
        requires(
            "moe_router_group_topk",
            "moe_router_num_groups",
            "{} chooses groups: say how many there are, --moe-router-num-groups",
        ),
        at_most("moe_router_group_topk", "moe_router_num_groups", "{} is more than {}: lower it"),
        Rule(
            ("moe_router_enable_expert_bias", "moe_router_score_function"),
            lambda bias, score: bias and score == "softmax",
            "{} needs --moe-router-score-function sigmoid or sqrtsoftplus, not softmax, whose "
            "scores depend on each other",
        ),
        Rule(
            ("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
            lambda k, score, pre: k == 1 and score == "softmax" and not pre,
            "{0} with softmax needs --moe-router-pre-softmax: the softmax of one score is always "
            "1, and the router would learn nothing",
        ),
        *(
            Rule(
                (name, "moe_min_capacity", "disable_moe_token_dropping"),
                lambda factor, least, is_off: factor == 0 and not least and not is_off,
                "{0} lets experts take no token at all: give a factor above 0, or -1 for all "
                "tokens, or --moe-min-capacity",
            )
            for name in ("moe_expert_capacity_factor", "moe_eval_capacity_factor")
        ),
        requires(
            "moe_pad_expert_input_to_capacity",
            "moe_expert_capacity_factor",
            "{} needs a capacity: give --moe-expert-capacity-factor, or leave it out",
        ),
        Rule(
            ("num_experts", "xielu"),
            lambda experts, xielu: (experts or 0) > 1 and xielu,
            "{}, {}: experts have an activation without learned numbers: give another one",
        ),
    )

    @property
    def has_experts(self) -> bool:
        """Whether there are experts to choose from."""
        return (self.num_experts or 0) > 1

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        text = self.moe_layer_freq.strip(QUOTED)
        if not self.has_experts:
            return (False,) * self.num_layers
        if text.isdecimal() and int(text) > 0:
            return tuple(layer % int(text) == 0 for layer in range(self.num_layers))
        return marks_of(text, self.num_layers, "--moe-layer-freq")

    @property
    def expert_ffn_size(self) -> int:
        """Width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def group_best(self) -> int:
        """How many of the best scores in a group are summed to rank it."""
        chosen = self.moe_router_group_topk or 1
        return self.moe_router_group_best or max(self.moe_router_topk // chosen, 1)

    @property
    def auxiliary_losses(self) -> dict[str, float]:
        """The coefficients of the losses that balance the load, those above 0, by their types."""
        types, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        named = zip(types, coefficients, strict=False)
        return {kind: each for kind, each in named if kind != NO_LOSS and each > 0}

    def capacity_factor(self, *, training: bool) -> float | None:
        """What an expert's even share of tokens is multiplied by to limit it; None: no limit."""
        factor = self.moe_expert_capacity_factor
        if not training and factor is not None and self.moe_eval_capacity_factor is not None:
            factor = self.moe_eval_capacity_factor
        if factor is None or factor < 0 or self.disable_moe_token_dropping:
            return None
        return factor

    def check(self) -> None:
        """Raise InputError for settings that do not fit each other."""
        super().check()
        if not self.has_experts:
            return
        if not any(self.moe_layers):
            raise InputError(
                f"--num-experts {self.num_experts} and --moe-layer-freq {self.moe_layer_freq}: no "
                f"layer of the {self.num_layers} has experts; change the second, or leave the "
                "first out"
            )
        self._check_groups()
        self._check_losses()

    def _check_groups(self) -> None:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None:
            return
        size = self.num_experts // groups
        if self.moe_router_topk > chosen * size:
            raise InputError(
                f"--moe-router-topk {self.moe_router_topk} is more than the {chosen * size} "
                f"experts of --moe-router-group-topk {chosen} groups of {size}: lower the first or "
                "raise the second"
            )
        if self.group_best > size:
            raise InputError(
                f"--moe-router-group-best: the sum of the best {self.group_best} scores is to rank "
                f"a group, but a group has {size} experts: give at most {size}"
            )

    def _check_losses(self) -> None:
        types, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        shown = f"--moe-router-load-balancing-type {' '.join(types)}"
        if len(set(types)) < len(types) or (NO_LOSS in types and len(types) > 1):
            raise InputError(f"{shown}: give each type once, and none only by itself")
        is_default = coefficients == (0.0,)
        if len(types) != len(coefficients) and not is_default:
            raise InputError(
                f"{shown} and --moe-aux-loss-coeff {' '.join(f'{c:g}' for c in coefficients)}: "
                f"{len(types)} types need as many coefficients, in their order"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig(Section):
    """How ranks share out experts (of ParallelConfig)"""

    expert_model_parallel_size: int | None = flag(
        None,
        "consecutive ranks that split the experts of a layer (default: as many of a node as divide "
        "the experts; 1 without ZeRO, and with tensor parallelism that does not split sequences)",
        minimum=1,
        aliases=("moe-expert-parallel-size",),
        no_effect=NEEDS_EXPERTS,
    )
    moe_dispatch_bits: int = flag(
        16,
        "bits of a number in rows that cross nodes on their way to experts, where nodes split them",
        choices=(8, 16),
        no_effect=NEEDS_EXPERTS,
    )


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
