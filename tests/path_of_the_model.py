"""Follows a model through `zeropp.shard`: which functions of ours touch it, in which order.

    torchrun --nproc-per-node 2 -m tests.path_of_the_model

A function touches the model if it calls one of PyTorch's with a module among the arguments, as
`module.named_parameters()` does; passing a module on is none. The first touch by a function is a
stop. A later one, after others have touched the model, is a return. A loop counts once, however
often it runs. Rank 0 prints JSON: the number of stops, that of returns, and the way.
"""

import json
import os
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeropp
from tests.zeropp.small_model import small_model
from zeropp.settings.zero_config import ZeroConfig

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(str(ROOT / package) + os.sep for package in ("zeropp", "megatron_zpp"))
TORCH = str(Path(torch.__file__).parent) + os.sep
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 1,
        "zero_quantized_gradients": True,
    },
    "zeropp": {"ranks_per_node": 1},
}  # fmt: skip


class Touches:
    """The functions of ours that touched a module, in order."""

    def __init__(self) -> None:
        self.functions: list[str] = []

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call of a function of PyTorch by one of ours, if it is given a module."""
        caller = frame.f_back
        if event != "call" or caller is None or not _is_in(caller, OURS):
            return
        if _is_in(frame, TORCH) and any(map(_is_module, _arguments(frame))):
            self.functions.append(_name(caller))


def without_loops(way: Sequence[Hashable]) -> list[Hashable]:
    """Return a way in which what is repeated at once, as often as it may be, stands once."""
    way = list(way)
    for length in range(1, len(way)):
        at = 0
        while at + 2 * length <= len(way):
            if way[at : at + length] == way[at + length : at + 2 * length]:
                del way[at : at + length]
            else:
                at += 1
    return way


def counts(way: Sequence[str]) -> dict[str, object]:
    """Return the stops and returns of a way without loops."""
    stops = list(dict.fromkeys(way))
    return {"stops": len(stops), "returns": len(way) - len(stops), "way": [*way]}


def _arguments(frame: FrameType) -> list[object]:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [frame.f_locals.get(name) for name in names]


def _is_module(value: object) -> bool:
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, nn.Module) for each in values)


def _is_in(frame: FrameType, folders: str | tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(folders)


def _name(frame: FrameType) -> str:
    """Return a function's name; what is defined in it, as a generator expression, is part of it."""
    function = frame.f_code.co_qualname.partition(".<locals>")[0]
    return f"{os.path.relpath(frame.f_code.co_filename, ROOT)}: {function}"


def main() -> None:
    """Print the way of a small model."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, config, touches = small_model(), ZeroConfig.from_json(SETTINGS), Touches()
    sys.setprofile(touches.note)
    zeropp.shard(model, mesh, config)
    sys.setprofile(None)
    if dist.get_rank() == 0:
        print(json.dumps(counts(without_loops(touches.functions))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
