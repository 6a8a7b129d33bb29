"""Megatron-LM's torch_dist checkpoints: files of torch.distributed.checkpoint.

What all ranks share, such as the arguments, is in common.pt beside them, or, since megatron-core
0.19, a pickled object in them. The tensors are whole whatever ranks wrote them. A weight of all
layers is one tensor with the layers as its first dim, or, in newer checkpoints, a tensor for each
layer, in which the halves of a gated MLP's matrix are apart, as `weight_w` and `weight_v`. Adam's
moments have the weights' names behind `optimizer.state.exp_avg.`, fp32 masters of 16-bit weights
behind `fp32_param` or `param`. The distributed optimizer until megatron-core 0.14 saves them as
grids of flat parts, later, unless it is asked for `fully_reshardable`, by ranks and buckets
(distributed_optimizer/).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.interchange.foreign.distributed_optimizer.gathered_state import MAIN, ByKey
from megatron_zpp.interchange.foreign.distributed_optimizer.rank_states import (
    has_rank_states,
    read_rank_states,
    updates,
)
from megatron_zpp.interchange.foreign.main_weights import with_main_weights
from megatron_zpp.interchange.foreign.megatron_args import args_in
from megatron_zpp.interchange.foreign.megatron_names import core_name, is_constant
from megatron_zpp.interchange.foreign.pickles import load_pickle
from megatron_zpp.interchange.foreign.rank_parts import SavedGrid, joined_by_capability
from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.foreign.tensor_files import (
    COMMON_STATE,
    MOMENTUM,
    NOT_ASKED_FOR,
    NOT_TAKEN,
    ForeignCheckpoint,
    LazyTensor,
    NamedTensors,
    UnmappedStateError,
)
from zeropp.errors import InputError
from zeropp.optim import MOMENTS

COMMON = "common.pt"
STATE = "optimizer.state."
MASTERS = ("fp32_param.", "param.")


def read_torch_dist(folder: Path, *, load_optimizer: bool = True) -> ForeignCheckpoint:
    """Return what is in a checkpoint; raises InputError if it is damaged or incomplete."""
    tensors = ShardTensors(folder)
    common, args = _common(tensors)
    parts: dict[str, dict[str, LazyTensor]] = {}
    for name in tensors.shapes():
        kind, weight = _kind(name)
        if kind is not None and not is_constant(weight) and (load_optimizer or not kind):
            parts.setdefault(kind, {}).update(_by_layer(tensors, name, weight))
    by_kind = {
        kind: joined_by_capability(_with_halves(each, folder), str(folder))
        for kind, each in parts.items()
    }
    weights = by_kind.get("", {})
    main = next((by_kind[kind] for kind in MASTERS if kind in by_kind), {})
    state, step, reason = {}, 0.0, NOT_ASKED_FOR
    if load_optimizer:
        try:
            state, step = _state(tensors, by_kind, common, args)
            main, reason = state.pop(MAIN, main), ""
        except UnmappedStateError as error:
            reason = str(error)
    weights = with_main_weights(weights, main, str(folder))
    return ForeignCheckpoint(
        weights=NamedTensors(str(folder), weights),
        moments={key: NamedTensors(f"{folder}: {key}", each) for key, each in state.items()},
        step=step,
        without_moments=reason,
        iteration=int(common.get("iteration", 0)),
        args=args,
    )


def _common(tensors: ShardTensors) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return what the ranks share, and the arguments in it.

    An object among the tensors was saved with them; common.pt may be of an older save.
    """
    if COMMON_STATE in tensors.names():
        common, where = tensors.pickled(COMMON_STATE), f"{tensors.folder}: {COMMON_STATE}"
    else:
        path = tensors.folder / COMMON
        if not path.is_file():
            raise InputError(
                f"{path}: missing, and there is no {COMMON_STATE} in the files of tensors: copy "
                "the whole folder"
            )
        common, where = load_pickle(path), str(path)
    return common, args_in(common, where)


def _state(
    tensors: ShardTensors,
    by_kind: Mapping[str, dict[str, LazyTensor]],
    common: Mapping[str, Any],
    args: Mapping[str, Any],
) -> tuple[ByKey, float]:
    """Return Adam's moments, with the fp32 weights if they are in buckets, and its updates.

    Raises UnmappedStateError if there are none that can be mapped to weights.
    """
    if any(f".{MOMENTUM}." in name for name in tensors.names()):
        raise UnmappedStateError(NOT_TAKEN)
    if has_rank_states(tensors):
        grid = SavedGrid.of(args, str(tensors.folder))
        state = read_rank_states(tensors, by_kind.get("", {}), args, grid)
        step = updates(tensors)
    else:
        state = {key: by_kind[f"{key}."] for key in MOMENTS if f"{key}." in by_kind}
        step = _step(common)
    if not state.keys() >= set(MOMENTS):
        raise UnmappedStateError("there is no state of Adam in it")
    if step is None:
        raise UnmappedStateError("it does not say how many updates were made")
    return state, step


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
    shape = tensors.shape(weight if weight in tensors.names() else name)
    try:
        if not marker or rest.split(".")[0].isdigit():
            return {core_name(weight): tensors.whole(name).ungridded(shape)}
        return {
            core_name(f"{head}layers.{layer}.{rest}"): tensors.row(name, layer).ungridded(shape[1:])
            for layer in range(shape[0])
        }
    except ValueError as error:
        raise InputError(f"{tensors.folder}: {name}: {error}") from error


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
