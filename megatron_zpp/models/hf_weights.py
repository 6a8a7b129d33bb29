"""Hugging Face's tensors as those of our model, and ours as theirs, one at a time."""

from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.checkpoint.safetensors_files import Item
from megatron_zpp.checkpoint.weight_source import WeightSource
from megatron_zpp.model.gpt import GPT
from megatron_zpp.models.tensor_forms import Sizes
from megatron_zpp.models.weight_names import Row, Table
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

MOST_LINES = 40


class Tensors(Protocol):
    """Tensors under Hugging Face's names; `place` says in errors where they lie."""

    place: str

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU."""


class ForeignWeights:
    """Hugging Face's tensors under our names.

    Raises InputError, which names every tensor that is missing, too many or of another shape.
    """

    def __init__(
        self, tensors: Tensors, table: Table, model: ModelConfig, vocab_rows: int, padded_rows: int
    ) -> None:
        self.tensors, self._table = tensors, table
        self._sizes = Sizes(model=model, vocab_rows=vocab_rows, padded_rows=padded_rows)
        if model.num_layers > len(tensors.facts()):  # before so many layers are laid out
            raise InputError(
                f"{tensors.place}: {len(tensors.facts())} tensors cannot be {model.num_layers:,} "
                "layers, which its settings say"
            )
        ours = shapes(model, padded_rows)
        self._rows = {name: table.row(name) for name in ours}
        self._names = _full_names(tensors, table)  # as in the table -> as in the files
        self._check(ours)
        facts = tensors.facts()
        self._facts = {
            name: ours[name].to(reduce(torch.promote_types, self._dtypes(row, facts)))
            for name, row in self._rows.items()
        }

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by our name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """One whole tensor of ours on the CPU, in the dtype of the file."""
        row, dtype = self._rows[name], self._facts[name].dtype
        parts = [self.tensors.read(self._names[theirs]).to(dtype) for theirs in row.theirs]
        return row.form.join(parts, self._sizes).contiguous()

    def _dtypes(self, row: Row, facts: dict[str, Tensor]) -> list[torch.dtype]:
        return [facts[self._names[name]].dtype for name in row.theirs]

    def _check(self, ours: dict[str, Tensor]) -> None:
        facts = self.tensors.facts()
        expected = {
            name: part.shape
            for row in self._rows.values()
            for name, part in zip(
                row.theirs, row.form.split(ours[row.ours], self._sizes), strict=True
            )
        }
        lines = [f"missing: {name}" for name in expected if name not in self._names]
        for name, there in self._names.items():
            if name in expected and facts[there].shape != expected[name]:
                lines.append(
                    f"{there} has shape {list(facts[there].shape)}, expected {list(expected[name])}"
                )
            elif name not in expected and not self._is_superfluous(name, there):
                lines.append(f"extra: {there}")
        if lines:
            more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
            shown = "\n  ".join([*lines[:MOST_LINES], *more])
            raise InputError(
                f"{self.tensors.place}: its tensors are not those of its settings:\n  {shown}"
            )

    def _is_superfluous(self, name: str, there: str) -> bool:
        """Whether a tensor may be left out: a constant, or the embedding once more."""
        if self._table.is_constant(name):
            return True
        embedding = self._names.get(self._table.embedding)
        if name != self._table.head or embedding is None:
            return False
        if torch.equal(self.tensors.read(there), self.tensors.read(embedding)):
            return True
        raise InputError(
            f"{self.tensors.place}: {there} differs from {embedding}, but the settings say "
            "tie_word_embeddings: set it to false in config.json"
        )


def foreign_items(
    weights: WeightSource, table: Table, sizes: Sizes, dtype: torch.dtype | None
) -> list[Item]:
    """Our weights as Hugging Face's tensors, ready to be written; dtype None keeps each one's."""
    items, last = [], _Last(weights)
    for ours, facts in weights.facts().items():
        row = table.row(ours)
        for index, part in enumerate(row.form.split(facts, sizes)):
            items.append(
                Item(
                    name=row.theirs[index],
                    shape=tuple(part.shape),
                    dtype=dtype or facts.dtype,
                    read=lambda row=row, index=index: row.form.split(last.read(row.ours), sizes)[
                        index
                    ],
                )
            )
    return items


def shapes(model: ModelConfig, padded_rows: int) -> dict[str, Tensor]:
    """The parameters of a model with so many rows in its vocabulary, on the meta device."""
    with torch.device("meta"):
        gpt = GPT(model, padded_rows)
    assert gpt.padded_vocab_size == padded_rows
    return {name: parameter.detach() for name, parameter in gpt.named_parameters()}


class _Last:
    """Keeps the tensor read last: the parts of one are written one after another."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self._name, self._tensor = "", torch.empty(0)

    def read(self, name: str) -> Tensor:
        if name != self._name:
            self._tensor = torch.empty(0)  # let go of the old one first
            self._name, self._tensor = name, self._weights.read(name)
        return self._tensor


def _full_names(tensors: Tensors, table: Table) -> dict[str, str]:
    """Names as the table has them -> as the files have them, which may leave out the prefix."""
    found = list(tensors.facts())
    if any(name.startswith(table.prefix) for name in found):
        return {name: name for name in found}
    return {name if name == table.head else table.prefix + name: name for name in found}
