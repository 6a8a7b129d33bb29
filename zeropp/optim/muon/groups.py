"""Groups of parameters, Muon's and AdamW's, and the options of Muon's."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from zeropp.errors import InputError
from zeropp.optim.muon.names import SCALE_MODES

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


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters of a model in two groups, Muon's and AdamW's.

    Matrices of modules in `nn.ModuleList`s are Muon's, but not those of embeddings. Raises
    InputError for a model without any.
    """
    embedded = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    in_blocks = {
        parameter: None
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.ndim == 2 and parameter not in embedded
    }
    others = [each for each in model.parameters() if each.requires_grad and each not in in_blocks]
    if not in_blocks:
        raise InputError(
            "Muon: no trained matrix inside an nn.ModuleList: give groups of parameters with "
            "use_muon, as [{'params': matrices, 'use_muon': True}, {'params': others, "
            "'use_muon': False}]"
        )
    groups = [{"params": [*in_blocks], "use_muon": True}, {"params": others, "use_muon": False}]
    return [group for group in groups if group["params"]]


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
    shapes = [[*each.shape] for each in tensors_in(group) if each.ndim != 2]
    if group["use_muon"] and shapes:
        raise InputError(
            f"Muon orthogonalizes matrices, and use_muon is set for a parameter of shape "
            f"{shapes[0]}: put it into a group with use_muon False"
        )


def tensors_in(group: Mapping[str, Any]) -> list[Tensor]:
    """Return the parameters of a group, without names."""
    return [each[1] if isinstance(each, tuple) else each for each in group["params"]]
