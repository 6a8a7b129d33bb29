"""Experts as PEFT adapts them: all experts of a layer have one A and one B.

In transformers 5 the experts of a layer are two parameters, of which PEFT adapts those that
`target_parameters` names. E experts, F width of each, H hidden, r rank:

    gate_up_proj [E, 2F, H]: gate, then input        A [E r, in]    expert after expert
    down_proj    [E, H, F]                           B [out, r E]   column k E + e: the k-th of e

GPT-OSS has their transposes, and gate and input in turn; what goes into an expert, and what comes
out, is the same. Gate and input share an adapter. Two of rank r are one of rank 2 r whose B has
zeros where one's columns meet the other's rows. If both parameters have adapters, PEFT puts one
wrapper into the other, and calls the inner one `base_layer`. Versions before 0.19.1 took the two
dims of an expert's matrix for [in, out], and 0.19.0 those of a transpose for [out, in]; their A has
as many columns as a matrix has rows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_zpp.interchange.adapters.peft_config import PeftConfig
from megatron_zpp.interchange.families.capabilities.experts import (
    EACH_EXPERT,
    EVEN_OUTPUTS,
    FUSED_EXPERTS,
    TRANSPOSED_EXPERTS,
)
from megatron_zpp.interchange.families.forms import Form
from megatron_zpp.interchange.families.names import NameTable
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError, first_few

EXPERTS = ".mlp.experts."  # in the names of our layers
OF_EXPERTS = re.compile(r".*\.(gate_proj|up_proj|down_proj|w1|w2|w3)")  # PEFT's names of experts
NAME_PARTS = 3  # components of the shortest name of a parameter: mlp.experts.down_proj
LAYOUT_VERSION = "0.19.1"  # of PEFT, the first with this layout of experts
# PEFT takes dim 2 of [E, out, in] for what goes in since one version, and did so of [E, in, out] in
# another.
EXPERTS_FIXED, TRANSPOSES_SWAPPED = (0, 19, 1), (0, 19, 0)
MODULE = "model.layers.{}.mlp.experts"  # in most families
KNOWN = (EACH_EXPERT, *FUSED_EXPERTS, *TRANSPOSED_EXPERTS)  # as transformers has them
# The layers whose rows each parameter has, one after another, in the order of PEFT's wrappers.
PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gate_up_proj": ("gate", "input"), "down_proj": ("output",)}
)


@dataclass(frozen=True, kw_only=True)
class FusedParameter:
    """A parameter of transformers that has the matrices of all experts of a layer.

    module: the one that has it. layers: ours whose rows it has, one after another.
    rows: of each of these in an expert. columns: of all of them. step: from one of a layer's rows
    to the next. is_transposed: the parameter is [E, in, out].
    """

    module: str
    name: str
    layers: tuple[str, ...]
    rows: int
    columns: int
    num_experts: int
    step: int = 1
    is_transposed: bool = False

    @property
    def target(self) -> str:
        """Its name, as `target_parameters` names it."""
        return f"{self.module}.{self.name}"

    def conflict(self, module: str) -> str:
        """Say that an expert's module has an adapter beside this one."""
        return f"{self.target} has adapters of all experts, and {module} one of its own"

    def wrapper(self, adapted: Sequence["FusedParameter"]) -> str:
        """Return the module that has A and B, if PEFT adapts these parameters of the module."""
        return self.module + ".base_layer" * (len(adapted) - 1 - adapted.index(self))

    def shapes(self, rank: int, *, is_transposed: bool = False) -> tuple[list[int], list[int]]:
        """Return the shapes of A and B; transposed they are those of old versions of PEFT."""
        sizes = self.columns, self.rows * len(self.layers)
        num_in, num_out = reversed(sizes) if is_transposed else sizes
        return [rank * self.num_experts, num_in], [num_out, rank * self.num_experts]

    def delta(self, layer: str, a: Tensor, b: Tensor, *, is_transposed: bool) -> Tensor:
        """Return B A of the rows that one of `layers` has, [E rows, columns]."""
        num, own = self.num_experts, self._rows_of(layer)
        each_a = a.unflatten(0, (num, -1))  # [E, r, in]
        each_b = b.unflatten(1, (-1, num)).permute(2, 0, 1)  # [E, out, r]
        if is_transposed:
            return (each_a.mT[:, own] @ each_b.mT).flatten(0, 1)
        return (each_b[:, own] @ each_a).flatten(0, 1)

    def joined_a(self, parts: Sequence[Tensor]) -> Tensor:
        """Return A of our adapters [E r, in] of some of `layers` side by side, [E r n, in]."""
        each = [part.unflatten(0, (self.num_experts, -1)) for part in parts]
        return torch.cat(each, 1).flatten(0, 1)

    def joined_b(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return B of our adapters [E rows, r], by layer, side by side, [out, r n E]."""
        ranks = [part.shape[1] for part in parts.values()]
        first = next(iter(parts.values()))
        whole = first.new_zeros(self.num_experts, self.rows * len(self.layers), sum(ranks))
        column = 0
        for layer, part in parts.items():
            each = part.unflatten(0, (self.num_experts, -1))
            whole[:, self._rows_of(layer), column : column + part.shape[1]] = each
            column += part.shape[1]
        return whole.permute(1, 2, 0).flatten(1)

    def _rows_of(self, layer: str) -> slice:
        """Return where the rows of one of `layers` are among those that come out."""
        place = self.layers.index(layer)
        if self.step > 1:
            return slice(place, None, self.step)
        return slice(place * self.rows, (place + 1) * self.rows)


def is_fused(layer: str) -> bool:
    """Whether one of our layers is of experts."""
    return EXPERTS in layer


def named_by_weight(model: ModelConfig, modules: Sequence[str]) -> list[str]:
    """Return the modules that PEFT would take for experts in a model that has some."""
    return [each for each in modules if model.has_experts and OF_EXPERTS.fullmatch(each)]


def fused_parameters(model: ModelConfig, table: NameTable) -> list[FusedParameter]:
    """Return the fused parameters of all layers with experts, in PEFT's order.

    There are none for a family whose experts transformers lays out in another way.
    """
    return [
        FusedParameter(
            module=table.modules.get("experts", MODULE).format(block),
            name=name,
            layers=tuple(f"blocks.{block}{EXPERTS}{layer}" for layer in layers),
            rows=model.expert_ffn_size if name == "gate_up_proj" else model.hidden_size,
            columns=model.hidden_size if name == "gate_up_proj" else model.expert_ffn_size,
            num_experts=model.num_experts,
            step=2 if forms[0] is EVEN_OUTPUTS else 1,
            is_transposed=forms[0] in TRANSPOSED_EXPERTS,
        )
        for block, has_experts in enumerate(model.moe_layers)
        if has_experts and model.is_gated
        for name, layers in PARAMETERS.items()
        for forms in [[_form(table, f"blocks.{block}{EXPERTS}{layer}") for layer in layers]]
        if all(form in KNOWN for form in forms)
    ]


def fused_layers(
    adapted: Sequence[str], table: NameTable, model: ModelConfig
) -> dict[FusedParameter, list[str]]:
    """Return the parameters of experts that have adapters, and which of their layers have some.

    Raises InputError for experts that transformers lays out in a way that is not known.
    """
    layers = [layer for layer in adapted if is_fused(layer)]
    if not layers:
        return {}
    fused = {
        parameter: [layer for layer in parameter.layers if layer in layers]
        for parameter in fused_parameters(model, table)
    }
    fused = {parameter: own for parameter, own in fused.items() if own}
    unknown = set(layers).difference(*fused.values())
    if unknown:
        raise InputError(
            f"--to-peft: {first_few(sorted(unknown))}: how PEFT lays out adapters of this family's "
            "experts is not known: --to-hf writes the model with all adapters merged"
        )
    return fused


def adapted_in_module(
    parameters: Sequence[FusedParameter], config: PeftConfig
) -> dict[FusedParameter, list[FusedParameter]]:
    """Return the parameters that PEFT adapts, each with those of its module that it adapts."""
    adapted = [each for each in parameters if config.adapts_parameter(each.target)]
    return {
        parameter: [other for other in adapted if other.module == parameter.module]
        for parameter in adapted
    }


def require_layout(
    parameter: FusedParameter, a: Tensor, b: Tensor, config: PeftConfig
) -> bool | None:
    """Return whether A and B are transposed; None if they have none of the expected shapes.

    Raises InputError where both layouts have the same shapes, and the version of PEFT is unknown.
    """
    shapes = [list(a.shape), list(b.shape)]
    rank = config.rank(parameter.target)
    fits = [
        is_transposed
        for is_transposed in (False, True)
        if shapes == [*parameter.shapes(rank, is_transposed=is_transposed)]
    ]
    if len(fits) < 2:
        return fits[0] if fits else None
    if config.version is None:
        raise InputError(
            f"{config.location}: peft_version is {config.content.get('peft_version')!r}: before "
            f"0.19.1 PEFT took rows of {parameter.target} for columns, and its shapes do not tell: "
            "add the version that trained the adapters"
        )
    if parameter.is_transposed:
        return config.version == TRANSPOSES_SWAPPED
    return config.version < EXPERTS_FIXED


def _form(table: NameTable, layer: str) -> Form:
    return table.row(f"{layer}.weight").form
