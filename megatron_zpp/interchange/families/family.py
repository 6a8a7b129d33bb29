"""What a row of the table of families is made of."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_zpp.interchange.families.names import NameTable, name_table
from megatron_zpp.settings.config import ModelConfig


class FamilySetting(Protocol):
    """A part of config.json and what it means for our model, converted in both directions."""

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        """Return the fields of ModelConfig that the content of a config.json sets.

        `location` is named in errors. Raises InputError for values that our model cannot have.
        """

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the entries of config.json for our model; what they cannot say is left out."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` and the class of its models: what config.json says, and the weights' names.

    `fields` of ModelConfig are the same in all models of the family. `vocab_size` is the default of
    transformers. `other_class_names` are classes of the same models elsewhere. Of families of one
    name the first is meant all of whose `marks` have one of the values in config.json, where a
    missing key is null. `further_layers` is the key that counts layers which predict further tokens
    (MTP), if there are such models. `packed_weights` are the methods of quantization whose files
    can be read. `names_of` is the table of the names of weights.
    """

    name: str
    class_name: str
    fields: Mapping[str, Any]
    settings: tuple[FamilySetting, ...]
    vocab_size: int
    names_of: str
    further_layers: str | None = None
    packed_weights: tuple[str, ...] = ()
    other_class_names: tuple[str, ...] = ()
    marks: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def is_meant(self, content: Mapping[str, Any]) -> bool:
        """Whether a config.json describes a model of this family."""
        class_names = content.get("architectures") or []
        own = (self.class_name, *self.other_class_names)
        bare = tuple(re.sub("(ForCausalLM|LMHeadModel)$", "Model", name) for name in own)
        has_class = not class_names or any(name in class_names for name in (*own, *bare))
        has_marks = all(content.get(key) in values for key, values in self.marks.items())
        return content.get("model_type") == self.name and has_class and has_marks

    @property
    def names(self) -> NameTable:
        """The names of the weights."""
        return name_table(self.names_of)

    def read_fields(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        """Return the fields of ModelConfig that a config.json sets."""
        fields = dict(self.fields)
        for setting in self.settings:
            fields |= setting.read(content, location)
        return fields

    def write_entries(self, model: ModelConfig) -> dict[str, Any]:
        """Return the entries of config.json for our model; what they cannot say is left out."""
        content: dict[str, Any] = {}
        for setting in self.settings:
            content |= setting.write(model)
        return content
