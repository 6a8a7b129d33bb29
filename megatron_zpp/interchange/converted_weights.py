"""Other programs' tensors as the weights of our GPT, and ours as theirs, one at a time.

This works for any table of names; comments speak of Hugging Face's tensors.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.checkpoint.safetensors_files import Item
from megatron_zpp.checkpoint.weight_source import WeightSource, parameter_shapes
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.families.names import NameRow, NameTable
from zeropp.errors import InputError, first_lines

log = logging.getLogger("megatron_zpp")


class TensorFiles(Protocol):
    """Tensors by the names that files give them, read one at a time; errors name `location`."""

    location: str

    def facts(self) -> dict[str, Tensor]:
        """Return every tensor's shape and dtype by name, as tensors on the meta device."""

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU."""


class ConvertedWeights:
    """Another program's tensors under the names of our GPT's parameters, a `WeightSource`.

    Raises InputError, which lists every tensor that is missing, unexpected or of another shape.
    """

    def __init__(self, tensors: TensorFiles, table: NameTable, sizes: Sizes) -> None:
        self.tensors, self._table, self._sizes = tensors, table, sizes
        hf_facts = tensors.facts()
        num_layers = sizes.model.num_layers
        if num_layers > len(hf_facts):  # checked before that many layers are built on meta
            raise InputError(
                f"{tensors.location}: {len(hf_facts)} tensors cannot be the {num_layers:,} layers "
                "that its settings ask for"
            )
        count, items = table.most_apart(sizes.model)
        if count > len(hf_facts):
            raise InputError(
                f"{tensors.location}: {len(hf_facts)} tensors cannot be those of the {count:,} "
                f"{items} that its settings ask for"
            )
        parameters = parameter_shapes(sizes.model, sizes.padded_rows)
        self._rows = {name: table.row(name, sizes.model) for name in parameters}
        self._file_names = _file_names(hf_facts, table)
        self._check(parameters, hf_facts)
        self._facts = {
            name: parameters[name].to(self._common_dtype(row, hf_facts))
            for name, row in self._rows.items()
        }

    def facts(self) -> dict[str, Tensor]:
        """Return every parameter's shape and dtype by name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """Return one whole parameter on the CPU, in the dtype of the file."""
        row, dtype = self._rows[name], self._facts[name].dtype
        parts = [self.tensors.read(self._file_names[hf_name]).to(dtype) for hf_name in row.hf_names]
        return row.form.join(parts, self._sizes).contiguous()

    def _common_dtype(self, row: NameRow, hf_facts: dict[str, Tensor]) -> torch.dtype:
        dtypes = [hf_facts[self._file_names[name]].dtype for name in row.hf_names]
        return reduce(torch.promote_types, dtypes)

    def _check(self, parameters: dict[str, Tensor], hf_facts: dict[str, Tensor]) -> None:
        expected_shapes = {
            hf_name: joined_parts(parts).shape
            for hf_name, parts in split_by_name(parameters, self._rows, self._sizes).items()
        }
        lines = [f"missing: {name}" for name in expected_shapes if name not in self._file_names]
        further = self._names_of_further_layers()
        for hf_name, file_name in self._file_names.items():
            shape, expected = hf_facts[file_name].shape, expected_shapes.get(hf_name)
            if expected is None:
                if hf_name not in further and not self._is_redundant(hf_name, file_name):
                    lines.append(f"extra: {file_name}")
            elif shape != expected:
                lines.append(f"{file_name} has shape {list(shape)}, expected {list(expected)}")
        if lines:
            raise InputError(
                f"{self.tensors.location}: its tensors are not those of its settings:\n  "
                f"{first_lines(lines)}"
            )
        if further:
            log.info(
                "%s: %d tensors of layers that predict further tokens (MTP) are left out",
                self.tensors.location,
                len(further),
            )

    def _names_of_further_layers(self) -> set[str]:
        """Return the tensors of layers behind the model's that only predict further tokens."""
        first = self._sizes.model.num_layers
        numbers = range(first, first + self._sizes.further_layers)
        prefixes = tuple(self._table.layer.format(number) for number in numbers)
        return {name for name in self._file_names if name.startswith(prefixes)}

    def _is_redundant(self, hf_name: str, file_name: str) -> bool:
        """Whether a tensor can be ignored: a constant, or a tied head that repeats the embedding.

        Raises InputError for a head that differs from the embedding it should be tied to.
        """
        if self._table.is_constant(hf_name):
            return True
        embedding = self._file_names.get(self._table.embedding)
        if hf_name != self._table.head or embedding is None:
            return False
        if torch.equal(self.tensors.read(file_name), self.tensors.read(embedding)):
            return True
        raise InputError(
            f"{self.tensors.location}: {file_name} differs from {embedding}, but its settings say "
            "that they are tied (tie_word_embeddings in config.json, or untie_embeddings_and_"
            "output_weights in Megatron's arguments): correct them"
        )


def converted_items(
    weights: WeightSource, table: NameTable, sizes: Sizes, dtype: torch.dtype | None
) -> list[Item]:
    """Return our weights as the tensors of a table, to be written; dtype None keeps each one's."""
    cache, facts = _LastTensor(weights), weights.facts()
    rows = {gpt_name: table.row(gpt_name, sizes.model) for gpt_name in facts}
    items = []
    for hf_name, parts in split_by_name(facts, rows, sizes).items():
        whole = joined_parts(parts)
        own_dtype = torch.float32 if parts[0][0].keeps_dtype else dtype
        items.append(
            Item(
                name=hf_name,
                shape=tuple(whole.shape),
                dtype=own_dtype or whole.dtype,
                read=partial(_read_tensor, hf_name, [row for row, _ in parts], cache, sizes),
            )
        )
    return items


def split_by_name(
    parameters: Mapping[str, Tensor], rows: Mapping[str, NameRow], sizes: Sizes
) -> dict[str, list[tuple[NameRow, Tensor]]]:
    """Return the rows whose parameters make up each of Hugging Face's tensors, with their parts."""
    tensors: dict[str, list[tuple[NameRow, Tensor]]] = {}
    for gpt_name, row in rows.items():
        parts = row.form.split(parameters[gpt_name], sizes)
        for hf_name, part in zip(row.hf_names, parts, strict=True):
            tensors.setdefault(hf_name, []).append((row, part))
    for parts in tensors.values():
        parts.sort(key=lambda part: part[0].form.place or 0)
    return tensors


def joined_parts(parts: Sequence[tuple[NameRow, Tensor]]) -> Tensor:
    """Return one of Hugging Face's tensors from what rows have of it."""
    (row, first), *others = parts
    if not others:
        return first
    tensors = [first, *(part for _, part in others)]
    if row.form.is_in_turn:
        return torch.stack(tensors, dim=-1).flatten(-2)
    return torch.cat(tensors, dim=row.form.dim)


def _read_tensor(
    hf_name: str, rows: Sequence[NameRow], cache: "_LastTensor", sizes: Sizes
) -> Tensor:
    parts = [
        (row, row.form.split(cache.read(row.gpt_name), sizes)[row.hf_names.index(hf_name)])
        for row in rows
    ]
    return joined_parts(parts)


class _LastTensor:
    """Keeps the tensor that was read last, whose parts are written one after another."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self._name = ""
        self._tensor = torch.empty(0)

    def read(self, name: str) -> Tensor:
        if name != self._name:
            self._tensor = torch.empty(0)  # frees the previous tensor before the next is read
            self._tensor = self._weights.read(name)
            self._name = name
        return self._tensor


def _file_names(hf_facts: dict[str, Tensor], table: NameTable) -> dict[str, str]:
    """Map the names in the table to the names in the files, which may lack the prefix."""
    if any(name.startswith(table.prefix) for name in hf_facts):
        return {name: name for name in hf_facts}
    return {name if name == table.head else table.prefix + name: name for name in hf_facts}
