"""DeepSpeed's universal checkpoints: zero/<parameter>/fp32.pt, exp_avg.pt and exp_avg_sq.pt.

Each parameter is whole, whatever ranks saved the checkpoint that it was made of. Made of ZeRO 3 it
is flat; its shape is in the files of the model, and the number of updates in the optimizer's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.interchange.foreign.megatron_args import args_in
from megatron_zpp.interchange.foreign.megatron_names import core_names
from megatron_zpp.interchange.foreign.pickles import load_pickle
from megatron_zpp.interchange.foreign.tensor_files import (
    ForeignCheckpoint,
    LazyTensor,
    NamedTensors,
)
from megatron_zpp.interchange.foreign.zero_files import grid_of, iteration_of, update_counts
from zeropp.errors import InputError, first_few
from zeropp.optim import MOMENTS

FP32, STEP = "fp32", "step"


def read_universal_files(folder: Path, *, load_optimizer: bool = True) -> ForeignCheckpoint:
    """Return what is in a checkpoint; raises InputError if it is damaged or incomplete."""
    model_files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not model_files:
        raise InputError(f"{folder}: mp_rank_00_model_states.pt is missing, with the arguments")
    content = load_pickle(model_files[0])
    grid = grid_of(content, folder)
    by_key: dict[str, dict[str, LazyTensor]] = {
        key: {} for key in ((FP32, *MOMENTS) if load_optimizer else (FP32,))
    }
    steps = set()
    paths = sorted(each for each in (folder / "zero").iterdir() if each.is_dir())
    names = core_names([path.name for path in paths])
    shapes = {
        name: shape for group in content.get("param_shapes") or [] for name, shape in group.items()
    }
    for path in paths:
        missing = [f"{key}.pt" for key in by_key if not (path / f"{key}.pt").is_file()]
        if missing:
            raise InputError(f"{path}: {first_few(missing)}: missing; copy the whole folder")
        name = names[path.name]
        if grid.is_tied and name == "output_layer.weight":
            continue
        for key, tensors in by_key.items():
            tensors[name] = LazyTensor.of(_tensor(path / f"{key}.pt", shapes.get(path.name)))
        if (path / f"{STEP}.pt").is_file():
            steps.add(float(load_pickle(path / f"{STEP}.pt")))
    steps = steps or _common_steps(folder)
    if not load_optimizer:
        steps = {0.0}
    if not steps:
        raise InputError(
            f"{folder}: neither step.pt nor zero/optimizer_state.pt says how many updates were made"
        )
    if len(steps) > 1:
        raise InputError(f"{folder}: its parameters say {sorted(steps)} updates: mixed up")
    weights = by_key.pop(FP32)
    return ForeignCheckpoint(
        weights=NamedTensors(str(folder), weights),
        moments={key: NamedTensors(f"{folder}: {key}", each) for key, each in by_key.items()},
        step=steps.pop(),
        iteration=iteration_of(content),
        args=args_in(content, str(folder)),
    )


def _tensor(path: Path, shape: torch.Size | None) -> Tensor:
    content = load_pickle(path)
    tensor = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(tensor, Tensor):
        raise InputError(f"{path}: holds no tensor under 'param'")
    if shape is None or tensor.ndim != 1 or len(shape) == 1:
        return tensor
    if tensor.numel() != shape.numel():
        raise InputError(
            f"{path}: holds {tensor.numel():,} numbers, but the parameter of shape {list(shape)} "
            f"has {shape.numel():,}: files of another checkpoint are among them"
        )
    return tensor.view(shape)


def _common_steps(folder: Path) -> set[float]:
    """Return the numbers of updates in the optimizer's groups or in its state of flat vectors."""
    path = folder / "zero" / "optimizer_state.pt"
    content: Any = load_pickle(path) if path.is_file() else {}
    return set(update_counts(content)) if isinstance(content, Mapping) else set()
