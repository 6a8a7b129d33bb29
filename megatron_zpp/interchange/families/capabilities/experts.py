"""Mixtures of experts in files of Hugging Face's: settings of config.json, and forms of weights.

Legend: E experts, F width inside an expert, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.interchange.families.forms import Form, Sizes
from megatron_zpp.interchange.families.layers import NUM_LAYERS
from megatron_zpp.interchange.families.settings import Number
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.settings.gpt.layer_pattern import MAX_LAYERS
from zeropp.errors import InputError


def frequency_text(marks: Sequence[bool]) -> str:
    """Return the text of --moe-layer-freq for layers with and without experts."""
    if all(marks):
        return "1"
    runs = [(int(mark), len(list(run))) for mark, run in groupby(marks)]
    return "+".join(f"[{mark}]*{count}" for mark, count in runs)


def canonical(model: ModelConfig) -> dict[str, Any]:
    """Return the fields, each with its value filled in; {} for a dense model."""
    if not model.has_experts:
        return {}
    is_everywhere = all(model.moe_layers)
    return {
        "moe_layer_freq": frequency_text(model.moe_layers),
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "ffn_hidden_size": model.expert_ffn_size if is_everywhere else model.ffn_size,
        "moe_router_group_best": model.group_best if model.moe_router_num_groups else None,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }


def experts(key: str, default: int) -> Number:
    """Return the number of experts."""
    return Number(key, "num_experts", default, old_keys=("num_local_experts", "num_experts"))


@dataclass(frozen=True)
class FirstDenseLayers:
    """The first layers have no experts, as many as `first_k_dense_replace` says."""

    default: int
    key: str = "first_k_dense_replace"

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        num_dense = content.get(self.key, self.default)
        if not isinstance(num_dense, int) or not 0 <= num_dense <= MAX_LAYERS:
            raise InputError(f"{location}: {self.key} is {num_dense!r}; expected a number")
        if content.get("moe_layer_freq", 1) != 1:
            raise InputError(
                f"{location}: moe_layer_freq is {content['moe_layer_freq']!r}; only 1 is supported"
            )
        marks = [layer >= num_dense for layer in range(_num_layers(content, location))]
        return {"moe_layer_freq": frequency_text(marks)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        marks = (*model.moe_layers, True)
        return {self.key: marks.index(True)}


@dataclass(frozen=True)
class SparseLayers:
    """Every N-th layer has experts, by `decoder_sparse_step`, but those of `mlp_only_layers`."""

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        step, dense = content.get("decoder_sparse_step", 1), content.get("mlp_only_layers") or []
        if not isinstance(step, int) or step < 1:
            raise InputError(
                f"{location}: decoder_sparse_step is {step!r}; expected a whole number above 0"
            )
        if not isinstance(dense, list):
            raise InputError(f"{location}: mlp_only_layers is {dense!r}; expected a list")
        layers = range(_num_layers(content, location))
        marks = [layer not in dense and (layer + 1) % step == 0 for layer in layers]
        return {"moe_layer_freq": frequency_text(marks)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        dense = [layer for layer, has_experts in enumerate(model.moe_layers) if not has_experts]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclass(frozen=True)
class Groups:
    """Groups of experts, of which a token chooses some first: `n_group` and `topk_group`.

    A group is ranked by the sum of its `best` best scores. `methods` are the values of
    `topk_method`, the default first, and whether each of them has groups.
    """

    best: int
    methods: Mapping[str, bool]
    default: int | None = None
    default_chosen: int | None = None

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        method = content.get("topk_method", next(iter(self.methods)))
        if method not in self.methods:
            raise InputError(
                f"{location}: topk_method is {method!r}; expected {' or '.join(self.methods)}"
            )
        num_groups = Number("n_group", "moe_router_num_groups", self.default, may_be_none=True)
        chosen = Number(
            "topk_group", "moe_router_group_topk", self.default_chosen, may_be_none=True
        )
        fields = num_groups.read(content, location) | chosen.read(content, location)
        if not self.methods[method] or fields[num_groups.field] in (None, 1):
            return dict.fromkeys(fields)
        return fields | {"moe_router_group_best": self.best}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        num_groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
        method = next(
            name for name, has_groups in self.methods.items() if has_groups or num_groups is None
        )
        return {"topk_method": method, "n_group": num_groups or 1, "topk_group": chosen or 1}


@dataclass(frozen=True)
class SharedExperts:
    """Experts that all tokens pass: `n_shared_experts`, one MLP of their summed width."""

    default: int
    default_width: int

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        number = Number("n_shared_experts", "", self.default).value(content, location)
        width = Number("moe_intermediate_size", "", self.default_width).value(content, location)
        return {"moe_shared_expert_intermediate_size": number * width}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        shared = model.moe_shared_expert_intermediate_size or 0
        return {"n_shared_experts": shared // model.expert_ffn_size}


def _num_layers(content: Mapping[str, Any], location: str) -> int:
    num_layers = NUM_LAYERS.value(content, location) or 0
    if num_layers > MAX_LAYERS:
        raise InputError(f"{location}: num_hidden_layers is {num_layers}: at most {MAX_LAYERS}")
    return num_layers


def _of_experts(matrices: Tensor, sizes: Sizes) -> Tensor:
    """Our matrices of all experts, [E * out, in] → [E, out, in]."""
    return matrices.unflatten(0, (sizes.model.num_experts, -1))


def _half_of_experts(index: int) -> Form:
    """One half of the rows of each expert in [E, 2F, H]; another row of the table has the other."""
    return Form(
        join=lambda parts, sizes: parts[0].chunk(2, dim=1)[index].flatten(0, 1),
        split=lambda tensor, sizes: (_of_experts(tensor, sizes),),
        place=index,
        dim=1,
    )


def _in_turn(index: int) -> tuple[Form, Form]:
    """Every second output of each expert, for weights [E, H, 2F] and for biases [E, 2F]."""
    weights = Form(
        join=lambda parts, sizes: parts[0][..., index::2].transpose(1, 2).flatten(0, 1),
        split=lambda tensor, sizes: (_of_experts(tensor, sizes).transpose(1, 2),),
        place=index,
        is_in_turn=True,
    )
    biases = Form(
        join=lambda parts, sizes: parts[0][:, index::2].flatten(0, 1),
        split=lambda tensor, sizes: (_of_experts(tensor, sizes),),
        place=index,
        is_in_turn=True,
    )
    return weights, biases


EACH_EXPERT = Form(
    join=lambda parts, sizes: torch.cat(tuple(parts)),
    split=lambda tensor, sizes: _of_experts(tensor, sizes).unbind(0),
)
ALL_EXPERTS = Form(
    join=lambda parts, sizes: parts[0].flatten(0, 1),
    split=lambda tensor, sizes: (_of_experts(tensor, sizes),),
)
ALL_EXPERTS_TRANSPOSED = Form(
    join=lambda parts, sizes: parts[0].transpose(1, 2).flatten(0, 1),
    split=lambda tensor, sizes: (_of_experts(tensor, sizes).transpose(1, 2),),
)
FIRST_HALVES, SECOND_HALVES = _half_of_experts(0), _half_of_experts(1)
EVEN_OUTPUTS, EVEN_BIASES = _in_turn(0)
ODD_OUTPUTS, ODD_BIASES = _in_turn(1)
# Of [E, 2F, H], the gate's rows first, and [E, H, F]: the parameters that transformers has of all
# experts of a layer, in most families, also if its files have tensors for each expert.
FUSED_EXPERTS = (ALL_EXPERTS, FIRST_HALVES, SECOND_HALVES)
# Of [E, H, 2F], gate and input in turn, and [E, F, H].
TRANSPOSED_EXPERTS = (ALL_EXPERTS_TRANSPOSED, EVEN_OUTPUTS, ODD_OUTPUTS)
COUNTS = {"expert": lambda model: model.num_experts or 0}
CANONICAL = (canonical,)
