"""Megatron-LM's torch_dist checkpoints: common.pt beside files of torch.distributed.checkpoint.

The tensors are whole whatever ranks wrote them. A weight of all layers is one tensor with the
layers as its first dim, or, in newer checkpoints, a tensor for each layer, in which the halves of a
gated MLP's matrix are apart, as `weight_w` and `weight_v`. Adam's moments have the weights' names
behind `optimizer.state.exp_avg.`, fp32 masters of 16-bit weights behind `fp32_param` or `param`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.models.foreign.megatron_args import args_in
from megatron_zpp.models.foreign.megatron_names import core_name, is_constant
from megatron_zpp.models.foreign.pickles import load_pickle
from megatron_zpp.models.foreign.shard_tensors import ShardTensors
from megatron_zpp.models.foreign.tensor_files import ForeignCheckpoint, LazyTensor, NamedTensors
from zeropp.errors import InputError
from zeropp.optim.adam import MOMENTS

COMMON = "common.pt"
STATE = "optimizer.state."
MASTERS = ("fp32_param.", "param.")


def read_torch_dist(folder: Path) -> ForeignCheckpoint:
    """Return what is in a checkpoint; raises InputError if it is damaged or incomplete."""
    common = load_pickle(folder / COMMON)
    args = args_in(common, str(folder / COMMON))
    tensors = ShardTensors(folder)
    parts: dict[str, dict[str, LazyTensor]] = {}
    others = []
    for name in tensors.shapes():
        kind, weight = _kind(name)
        if kind is None:
            others.append(name)
        elif not is_constant(weight):
            parts.setdefault(kind, {}).update(_by_layer(tensors, name, weight))
    by_kind = {kind: _with_halves(each, folder) for kind, each in parts.items()}
    weights = by_kind.get("", {})
    masters = next((by_kind[kind] for kind in MASTERS if kind in by_kind), {})
    moments = {key: by_kind[f"{key}."] for key in MOMENTS if f"{key}." in by_kind}
    step, reason = _step(common), ""
    if set(moments) != set(MOMENTS) or step is None:
        moments = {}
        reason = _why_without(others)
    return ForeignCheckpoint(
        weights=NamedTensors(str(folder), weights | masters),
        moments={key: NamedTensors(f"{folder}: {key}", each) for key, each in moments.items()},
        step=step or 0,
        without_moments=reason,
        iteration=int(common.get("iteration", 0)),
        args=args,
    )


def _kind(name: str) -> tuple[str | None, str]:
    """Split a name into "" or "exp_avg." and the like, and the weight's; None: of no weight."""
    if name.startswith(STATE):
        key, _, weight = name.removeprefix(STATE).partition(".")
        return f"{key}.", weight
    if name.startswith(("optimizer.", "chained_", "rng_state", "rerun_state")):
        return None, name
    return "", name


def _by_layer(tensors: ShardTensors, name: str, weight: str) -> dict[str, LazyTensor]:
    """Return a tensor by megatron-core's name; one of all layers as a tensor for each."""
    head, marker, rest = weight.partition("layers.")
    if not marker or rest.split(".")[0].isdigit():
        return {core_name(weight): tensors.whole(name)}
    return {
        core_name(f"{head}layers.{layer}.{rest}"): tensors.row(name, layer)
        for layer in range(tensors.shapes()[name][0])
    }


def _with_halves(parts: Mapping[str, LazyTensor], folder: Path) -> dict[str, LazyTensor]:
    """Join the halves of gated matrices that are saved apart, gate first."""
    joined = {}
    for name, tensor in parts.items():
        match = re.fullmatch(r"(.*linear_fc1\.(?:weight|bias))_([wv])", name)
        if match is None:
            joined[name] = tensor
        elif match[2] == "w":
            other = parts.get(f"{match[1]}_v")
            if other is None:
                raise InputError(f"{folder}: {name} is there, and its other half {match[1]}_v not")
            joined[match[1]] = LazyTensor.cat([tensor, other], 0)
    return joined


def _step(common: Mapping[str, Any]) -> float | None:
    """Return how many updates Adam made; None if the file does not say."""
    optimizer = common.get("optimizer", {})
    inner = optimizer.get("optimizer", optimizer)
    step = inner.get("state", {}).get("common_step")
    if step is None:
        steps = [group.get("step") for group in inner.get("param_groups", [])]
        step = next((each for each in steps if each is not None), None)
    return None if step is None else float(step)


def _why_without(others: list[str]) -> str:
    if any("bucket" in name or "dp_group_idx" in name for name in others):
        return (
            "the distributed optimizer saved its state by ranks and buckets, not by weights: save "
            "with --dist-ckpt-optim-fully-reshardable to bring it along"
        )
    return "there is no state of Adam in it"
