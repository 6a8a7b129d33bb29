"""Write a model as a torch_dist checkpoint that Megatron-LM loads, with its weights.

It is a `release`: Megatron-LM starts at iteration 0 from it, with a new optimizer, under any tensor
and pipeline parallelism. A weight of all layers is one tensor with the layers as its first dim,
written layer by layer; where layers are not all of one kind each has tensors of its own.
"""

import io
import json
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_zpp.checkpoint.iteration_folders import POINTER
from megatron_zpp.checkpoint.safetensors_files import DTYPES, Item
from megatron_zpp.interchange.converted_weights import converted_items
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.foreign.megatron_args import CAPABILITIES, megatron_args
from megatron_zpp.interchange.foreign.megatron_names import megatron_names, stored_name
from megatron_zpp.interchange.foreign.torch_dist import COMMON
from megatron_zpp.interchange.open_model import OpenedModel
from megatron_zpp.settings.config import ModelConfig
from zeropp.atomic import write_atomically
from zeropp.checkpoint import write_plan
from zeropp.errors import InputError
from zeropp.settings import declared

RELEASE = "release"
# Modules for which megatron-core expects a state in addition to the weights; None stands for none.
OF_ATTENTION = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
)
OF_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")


def export_torch_dist(opened: OpenedModel, output: Path, dtype: str | None = None) -> Path:
    """Write the model to `output`/release; returns that folder.

    Tensors keep their dtype without `dtype`. Raises InputError for a model that Megatron-LM's
    arguments cannot describe, and if `output` exists and is not empty.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"--to-megatron {output}: exists already: name a new folder")
    model, rows = opened.config, opened.padded_vocab_size
    args = megatron_args(model, rows, f"--to-megatron: {opened.path}")
    sizes = Sizes(model=model, vocab_rows=rows, padded_rows=rows)
    items = converted_items(
        opened.weights, megatron_names(model), sizes, DTYPES[dtype] if dtype else None
    )
    folder = output / RELEASE
    folder.mkdir(parents=True)
    kinds = [kinds_of(model) for kinds_of in declared("LAYERS", CAPABILITIES)]
    is_stacked = all(len(set(each)) == 1 for each in kinds)
    parts = [part for item in items for part in _Part.of(item, model, is_stacked=is_stacked)]
    write_plan(folder, _Planner(parts, _states(model, is_stacked=is_stacked)))
    common = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}
    write_atomically(folder / COMMON, lambda file: torch.save(common, file))
    facts = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    _write_text(folder / "metadata.json", json.dumps(facts))
    _write_text(output / POINTER, RELEASE)
    return folder


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor, and its place in the one that is saved, whose shape is `size`, at `offsets`."""

    item: Item
    name: str
    size: torch.Size
    offsets: torch.Size

    @classmethod
    def of(cls, item: Item, model: ModelConfig, *, is_stacked: bool) -> "list[_Part]":
        """Return the parts that a tensor is saved as: one, or one for each of its names."""
        match = re.search(r"\.layers\.(\d+)\.", item.name)
        more = declared("NAMES", CAPABILITIES) if match is not None else ()
        names = [stored_name(item.name)]
        names += [name for of in more for name in of(item.name, model, int(match[1]))]
        layer, dims = ([], [0] * len(item.shape))
        if match is not None and is_stacked:
            names = [name.replace(match[0], ".layers.", 1) for name in names]
            layer, dims = [model.num_layers], [int(match[1]), *dims]
        size, offsets = torch.Size([*layer, *item.shape]), torch.Size(dims)
        return [cls(item=item, name=name, size=size, offsets=offsets) for name in names]

    @property
    def shape(self) -> torch.Size:
        """The shape of this part in the whole, with a 1 for its layer."""
        return torch.Size([*[1] * (len(self.size) - len(self.item.shape)), *self.item.shape])

    def write_item(self) -> WriteItem:
        """What torch.distributed.checkpoint writes of it."""
        return WriteItem(
            index=MetadataIndex(self.name, self.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=self.offsets, sizes=self.shape),
                properties=TensorProperties(dtype=self.item.dtype),
                size=self.size,
            ),
        )


class _Planner(DefaultSavePlanner):
    """Plans all parts, and the states of modules; reads each part when it is written."""

    def __init__(self, parts: Sequence[_Part], states: Sequence[str]) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {(part.name, part.offsets): part for part in parts}
        self._states = states

    def create_local_plan(self) -> SavePlan:
        """Return the plan of the one process that writes."""
        states = [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
            for name in self._states
        ]
        self.plan = SavePlan([*(part.write_item() for part in self._parts.values()), *states])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return a part's values, or the pickled state of a module that has none."""
        if write_item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([None], content)
            return content
        part = self._parts[write_item.index.fqn, write_item.index.offset]
        return part.item.read().to(part.item.dtype).reshape(part.shape).contiguous()


def _states(model: ModelConfig, *, is_stacked: bool) -> list[str]:
    """Return the names of the states of modules, by layer; those that a capability has are last."""
    names, num_layers = [], model.num_layers
    for layer in range(num_layers):
        head, shard = (
            ("decoder.layers.", f"{layer}_{num_layers}")
            if is_stacked
            else (f"decoder.layers.{layer}.", "0_1")
        )
        states_of = declared("STATES", CAPABILITIES)
        own = [each for of in states_of for each in of(model, layer, shard, is_stacked)]
        shards = [(module, shard) for module in OF_ATTENTION + (() if own else OF_MLP)]
        names += [f"{head}{module}._extra_state/shard_{number}" for module, number in shards + own]
    return names


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, text)
