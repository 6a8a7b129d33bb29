"""Follows a model through `zeropp.shard`, and a configuration through `build_model`.

    torchrun --nproc-per-node 2 -m tests.paths_of_the_build

A function of ours touches a module if it calls one of PyTorch's with the module among the
arguments, as in `module.named_parameters()`. It touches a configuration if it reads one of its
values. Passing either on is not a touch. A function's first touch is a stop; a later one, after
other functions have touched the object, is a return. A loop counts once, however often it runs.
Rank 0 prints JSON with the number of stops, the number of returns and the way of both.
"""

import json
import os
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeropp
from megatron_zpp.parallel.mesh import Ranks, build_mesh
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.recipe.model import build_model
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from tests.zeropp.small_model import small_model
from zeropp.ranks.topology import Environment
from zeropp.settings.schema import Section
from zeropp.settings.zero_config import ZeroConfig

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(str(ROOT / package) + os.sep for package in ("zeropp", "megatron_zpp"))
SETTINGS_ROOMS = tuple(folder + "settings" + os.sep for folder in OURS)
TORCH = str(Path(torch.__file__).parent) + os.sep
CPU = torch.device("cpu")
ZERO = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 1,
        "zero_quantized_gradients": True,
    },
    "zeropp": {"ranks_per_node": 1},
}
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 3e-3 --zero-stage 3"
)
VOCABULARY = 50


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


def _is_of_settings(frame: FrameType) -> bool:
    """Whether a frame is of settings, those of a capability among them: they read each other."""
    return _is_in(frame, SETTINGS_ROOMS) or frame.f_code.co_filename.endswith("settings.py")


def _is_in(frame: FrameType, folders: str | tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(folders)


def _name(frame: FrameType) -> str:
    """Return a function's name; what is defined in it, as a generator expression, is part of it."""
    function = frame.f_code.co_qualname.partition(".<locals>")[0]
    return f"{os.path.relpath(frame.f_code.co_filename, ROOT)}: {function}"


class Reads:
    """The functions of ours that read a value of a configuration, in order.

    A property of the configuration that reads other values counts for the function that uses it.
    """

    def __init__(self) -> None:
        self.functions: list[str] = []

    def traced(self, config: Any) -> Any:
        """Return a configuration, or a section, whose reads are noted, those of sections too."""
        kind, note = type(config), self._note

        class Traced(kind):
            def __getattribute__(self, name: str) -> Any:
                if not name.startswith("__"):
                    note(sys._getframe(1))
                return super().__getattribute__(name)

        traced = object.__new__(Traced)
        for name, value in vars(config).items():
            is_section = isinstance(value, Section)
            traced.__dict__[name] = self.traced(value) if is_section else value
        return traced

    def _note(self, frame: FrameType) -> None:
        while _is_of_settings(frame):
            frame = frame.f_back
        if _is_in(frame, OURS):
            self.functions.append(_name(frame))


def path_of_model() -> dict[str, object]:
    """Follow a small model through `zeropp.shard`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, config, touches = small_model(), ZeroConfig.from_json(ZERO), Touches()
    sys.setprofile(touches.note)
    zeropp.shard(model, mesh, config)
    sys.setprofile(None)
    return counts(without_loops(touches.functions))


def path_of_configuration() -> dict[str, object]:
    """Follow the configuration of a small run through `build_model`."""
    environment, config, reads = Environment.read(), parse(FLAGS.split(), 2), Reads()
    mesh = build_mesh(CPU, environment.world_size, config.parallel)
    ranks = Ranks(environment=environment, device=CPU, mesh=mesh, store=None)
    traced: Config = reads.traced(config)
    capabilities = capabilities_of(traced, ranks)  # as runs do
    reads.functions.clear()
    build_model(traced, VOCABULARY, ranks, apex=None, capabilities=capabilities)
    return counts(without_loops(reads.functions))


def main() -> None:
    """Print both paths."""
    dist.init_process_group("gloo")
    paths = {"model": path_of_model(), "configuration": path_of_configuration()}
    if dist.get_rank() == 0:
        print(json.dumps({"paths": paths}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
