"""The names of a GPT's weights in files of others: `names.toml`, a table for each kind of model.

Each row pairs a module of `megatron_zpp.model.gpt.GPT` with the Hugging Face modules whose weights
and biases hold the same numbers. `{}` stands for the number of the block, `{head}` and `{kv_head}`
for that of a query head and of a key-value head that has modules of its own, and so do the `COUNTS`
of capabilities. The tables are read in both directions, by import and export. A model uses only the
parameters that it has: biases, learned positions and a separate output layer depend on its
configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from megatron_zpp.interchange.families import forms
from megatron_zpp.interchange.families.forms import SAME, Form
from megatron_zpp.settings.config import ModelConfig
from zeropp.settings import declared, modules_of, read_toml

CAPABILITIES = "megatron_zpp.interchange.families.capabilities"
COUNTS = {
    "head": lambda model: model.num_attention_heads if model.qk_layernorm_per_head else 0,
    "kv_head": lambda model: model.kv_heads if model.qk_layernorm_per_head else 0,
}


@dataclass(frozen=True)
class NameRow:
    """A GPT module, the Hugging Face modules with the same numbers, and how they are laid out.

    `form` converts between the two. A row may also pair a single tensor with others, such as a
    buffer. In what `NameTable.row` returns, the names are those of one parameter and its tensors.
    With `keeps_dtype` the tensors are written in fp32 whatever the others are.
    """

    gpt_name: str
    hf_names: tuple[str, ...]
    form: Form = SAME
    keeps_dtype: bool = False

    def of(self, gpt_name: str, block: str, counts: Mapping[str, int], kind: str = "") -> "NameRow":
        """Return the row of one parameter of a block, whose `kind` ends the names.

        `counts` of heads and the like, by what stands for their numbers.
        """
        names = []
        for name in self.hf_names:
            item = next((item for item in counts if f"{{{item}}}" in name), "")
            numbers = range(counts[item] if item else 1)
            names += [name.format(block, **{item: number}) + kind for number in numbers]
        return replace(self, gpt_name=gpt_name, hf_names=tuple(names))


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """The names of all weights of one kind of model.

    `prefix` begins every name but that of the head; files of the bare model, without the head,
    leave it out. `embedding` is the tensor that a tied `head` shares. `constants` is a regular
    expression for tensors that old versions of transformers saved though they are not weights.
    `layer` begins the names of a block. `modules` are those that have some parameters of a block in
    transformers, whatever the names in files.
    """

    rows: tuple[NameRow, ...]
    prefix: str
    embedding: str
    constants: str
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    modules: Mapping[str, str] = field(default_factory=dict)

    def row(self, gpt_name: str, model: ModelConfig | None = None) -> NameRow:
        """Return the row of a GPT parameter, with all numbers filled in.

        Raises KeyError for a parameter of a module that this kind of model does not have.
        """
        number = re.search(r"\.(\d+)\.", gpt_name)
        pattern = gpt_name.replace(number[0], ".{}.", 1) if number else gpt_name
        module, _, kind = pattern.rpartition(".")  # kind: weight or bias
        block, counts = number[1] if number else "", counts_in(model)
        for wanted, end in ((pattern, ""), (module, f".{kind}")):
            for row in self.rows:
                if row.gpt_name == wanted:
                    return row.of(gpt_name, block, counts, end)
        raise KeyError(gpt_name)

    def most_apart(self, model: ModelConfig) -> tuple[int, str]:
        """Return of how many modules of a block files have tensors, and which they are."""
        names = [name for row in self.rows for name in row.hf_names]
        return max(
            (count, item.replace("_", "-") + "s")
            for item, count in (*counts_in(model).items(), ("", 0))
            if any(f"{{{item}}}" in name for name in names) or not item
        )

    def is_constant(self, hf_name: str) -> bool:
        """Whether a tensor, named with or without the prefix, is a constant and not a weight."""
        return any(re.fullmatch(self.constants, name) for name in (hf_name, self.prefix + hf_name))


def counts_in(model: ModelConfig | None) -> dict[str, int]:
    """Return how many heads and the like with parameters of their own a model has.

    The keys are what stands for their numbers in names. Without a model they are one each.
    """
    counts = COUNTS | dict(declared("COUNTS", CAPABILITIES))
    return {item: 1 if model is None else count(model) for item, count in counts.items()}


@cache
def name_table(name: str) -> NameTable:
    """Return a table of `names.toml`, and Llama's for names that it does not have."""
    rows, fields = _rows_and_fields(name)
    return NameTable(rows=tuple(_row(*row) for row in rows.items()), **fields)


def _rows_and_fields(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a table and those that it is like say: its rows, and the other fields."""
    own = dict(_tables().get(name, {"like": "llama"}))
    rows, fields = _rows_and_fields(own.pop("like")) if "like" in own else ({}, {})
    for part in own.pop("parts", ()):
        rows |= _tables()["parts"][part]
    return rows | own.pop("rows", {}), fields | own


@cache
def _tables() -> Mapping[str, Any]:
    return read_toml(__package__, "names.toml")


def _row(gpt_name: str, content: str | Mapping[str, Any]) -> NameRow:
    """Return a row of a name, or of names, their form and whether they keep their dtype."""
    fields = {"hf_names": [content]} if isinstance(content, str) else content
    names, form = tuple(fields["hf_names"]), fields.get("form", "SAME")
    modules = (forms, *modules_of("forms", CAPABILITIES))
    form = next(getattr(module, form) for module in modules if hasattr(module, form))
    return NameRow(gpt_name, names, form, fields.get("keeps_dtype", False))
