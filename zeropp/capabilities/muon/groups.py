"""Groups of parameters, Muon's and AdamW's, and the options of Muon's."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from zeropp.capabilities.muon.blocks import Matrix
from zeropp.capabilities.muon.settings import SCALE_MODES
from zeropp.capabilities.muon.sharded_matrix import matrix_of
from zeropp.errors import InputError, first_few

Group = dict[str, Any]
ADJUSTMENTS = MappingProxyType(  # torch's adjust_lr_fn -> scale_mode, extra_scale_factor
    {
        None: ("shape_scaling", 1.0),
        "original": ("shape_scaling", 1.0),
        "match_rms_adamw": ("spectral", 0.2),
    }
)
SCALE = ("scale_mode", "extra_scale_factor")
OPTIONS = (
    "momentum",
    "nesterov",
    "ns_coefficients",
    "ns_steps",
    "eps",
    *SCALE,
)
log = logging.getLogger("zeropp")


def muon_options(
    *,
    momentum: float,
    nesterov: bool,
    ns_coefficients: Sequence,
    ns_steps: int,
    eps: float = 1e-7,
    scale_mode: str,
    extra_scale_factor: float,
) -> Group:
    """Return what a group with `use_muon` holds; raises InputError for values out of range."""
    triples = [ns_coefficients] if isinstance(ns_coefficients[0], float | int) else ns_coefficients
    repeated = [tuple(map(float, each)) for each in triples]
    if len(repeated) < ns_steps:
        repeated += repeated[-1:] * (ns_steps - len(repeated))
    wrong = [f"momentum = {momentum}"] * (not 0 <= momentum < 1)
    wrong += [f"ns_steps = {ns_steps}"] * (not 1 <= ns_steps < 100)
    wrong += [f"ns_coefficients = {ns_coefficients}"] * any(len(each) != 3 for each in repeated)
    wrong += [f"scale_mode = {scale_mode}"] * (scale_mode not in SCALE_MODES)
    wrong += [f"extra_scale_factor = {extra_scale_factor}"] * (not extra_scale_factor > 0)
    if wrong:
        raise InputError(
            f"Muon cannot run with {', '.join(wrong)}: momentum is at least 0 and below 1, "
            "ns_steps 1 to 99, coefficients are triples, the factor is above 0, and scale_mode is "
            f"{', '.join(SCALE_MODES)}"
        )
    return {
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": tuple(repeated[:ns_steps]),
        "ns_steps": ns_steps,
        "eps": eps,
        "scale_mode": scale_mode,
        "extra_scale_factor": extra_scale_factor,
    }


def adjustment(adjust_lr_fn: str | None) -> tuple[str, float]:
    """Return `scale_mode` and `extra_scale_factor` for torch's name; InputError for another."""
    if adjust_lr_fn not in ADJUSTMENTS:
        names = ", ".join(f'"{name}"' for name in ADJUSTMENTS if name)
        raise InputError(f'Muon: adjust_lr_fn = "{adjust_lr_fn}": expected {names} or None')
    return ADJUSTMENTS[adjust_lr_fn]


def with_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Group:
    """Return a group whose options are its own, and the defaults where it has none.

    Only one with `use_muon` has Muon's. Raises InputError as `muon_options` does.
    """
    if not group.get("use_muon"):
        return dict(group)
    own = _with_scale(group)
    merged = {**defaults, **own}
    return {**own, **muon_options(**{name: merged[name] for name in OPTIONS})}


def as_saved(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Return saved groups as ours: torch.optim.Muon's is Muon's, and AdamW's may have been saved.

    Where another optimizer saved a group of ours, its rate and decay are taken, and nothing else.
    """
    groups = []
    for index, group in enumerate(saved):
        ours = own[index] if index < len(own) else {}
        is_muons = group.get("use_muon", "ns_coefficients" in group)
        use_muon = is_muons or bool(ours.get("use_muon"))
        taken = _with_scale(group) | {"use_muon": use_muon}
        if use_muon and not is_muons:
            taken |= {name: ours[name] for name in OPTIONS}
        taken = {key: value for key, value in ours.items() if key != "params"} | taken
        groups.append(with_options(taken, {}) if use_muon else taken)
    return groups


def _with_scale(group: Mapping[str, Any]) -> Group:
    """Return a group with our names for torch's `adjust_lr_fn`, unless it says both."""
    own = dict(group)
    if "adjust_lr_fn" in own:
        factors = dict(zip(SCALE, adjustment(own.pop("adjust_lr_fn")), strict=True))
        own = factors | own
    return own


def groups_of(model: nn.Module, chosen: Iterable[Any] = ()) -> list[Group]:
    """Return parameters of a model in groups that say `use_muon`; see `matrices_of`.

    `chosen`: parameters, or groups, each of which becomes two unless it says `use_muon`; by default
    all that are trained. A line names those of three or more dims that AdamW updates. Raises
    InputError if there is no matrix.
    """
    trained = {each: name for name, each in model.named_parameters() if each.requires_grad}
    of_muon, items = matrices_of(model), [*chosen] or [*trained]
    groups = [each for each in items if isinstance(each, Mapping)]
    if of_muon.isdisjoint(trained) and not any("use_muon" in group for group in groups):
        raise InputError(
            "Muon: no trained matrix in the model but embeddings: give groups of parameters with "
            "use_muon, as [{'params': matrices, 'use_muon': True}, {'params': others, "
            "'use_muon': False}]"
        )
    if others := [name for each, name in trained.items() if each.ndim > 2 and each not in of_muon]:
        log.info("Muon: AdamW updates %s, which are no matrices", first_few(others))
    groups.insert(0, {"params": [each for each in items if not isinstance(each, Mapping)]})
    return [
        {**group, "params": own, "use_muon": use_muon}
        for group in listed(groups)
        for use_muon in (True, False)
        if (
            own := [x for x in tensors_in(group) if group.get("use_muon", x in of_muon) == use_muon]
        )
    ]


def matrices_of(model: nn.Module) -> set[Tensor]:
    """Return the parameters inside `nn.ModuleList`s of a model, if it has any, that are Muon's.

    These are matrices, also in stacks of experts, but neither embeddings nor output layers.
    """
    lists = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    inside = tuple(name and f"{name}." for name in lists) or ("",)
    stacks, found = stacks_of(model), set()
    for name, each in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        is_end = isinstance(module, nn.Embedding) or "embed" in name.lower() or "lm_head" in name
        has_stacks = not stacks.keys().isdisjoint(module.parameters(recurse=False))
        is_matrix = each in stacks if has_stacks else each.ndim == 2 and not is_end
        if is_matrix and name.startswith(inside):
            found.add(each)
    return found


def stacks_of(model: nn.Module) -> dict[Tensor, Matrix]:
    """Return the stacks of experts' matrices, [E, outputs, inputs] or [E, inputs, outputs]."""
    stacks: dict[Tensor, Matrix] = {}
    for path, module in model.named_modules():
        own = {name: each for name, each in module.named_parameters("", False) if each.ndim == 3}
        pair = [own[name] for name in ("gate_up_proj", "down_proj") if name in own]
        is_transposed = len(pair) == 2 and pair[0].shape[2] == 2 * pair[1].shape[1]
        number = getattr(module, "num_experts", None)
        for name, each in own.items():
            if each.shape[0] == number or "expert" in f"{path}.{name}".lower():
                stacks[each] = matrix_of(each, is_transposed=is_transposed)
    return stacks


def listed(groups: Iterable[Any]) -> list[Group]:
    """Return groups whose parameters are lists, as each may be read once only.

    Parameters that are in no group are one group each, without `use_muon`.
    """
    result = []
    for each in groups:
        group = dict(each) if isinstance(each, Mapping) else {"params": [each]}
        params = group["params"]
        if not isinstance(params, set):  # which torch refuses
            group["params"] = [params] if isinstance(params, Tensor) else [*params]
        result.append(group)
    return result


def require_matrices(group: Mapping[str, Any]) -> None:
    """Raise InputError for a group that Muon cannot take."""
    if "use_muon" not in group:
        raise InputError(
            "Muon: a group has no use_muon: set it to True for matrices inside the model, and "
            "to False for embeddings, output layers and vectors, which AdamW updates"
        )
    shapes = [[*each.shape] for each in tensors_in(group) if each.ndim not in (2, 3)]
    if group["use_muon"] and shapes:
        raise InputError(
            "Muon orthogonalizes matrices, and stacks [E, m, n] of them, and use_muon is set for a "
            f"parameter of shape {shapes[0]}: put it into a group with use_muon False"
        )


def tensors_in(group: Mapping[str, Any]) -> list[Tensor]:
    """Return the parameters of a group, without names."""
    return [each[1] if isinstance(each, tuple) else each for each in group["params"]]
