"""What a row of the table of families is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_zpp.interchange.families.names import NameTable
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

    `vocab_size` and `is_tied` are the defaults of transformers. A family that is not `exported` is
    a special case of another, as which it is written.
    """

    name: str
    class_name: str
    settings: tuple[FamilySetting, ...]
    names: NameTable
    vocab_size: int
    is_tied: bool = False
    exported: bool = True

    def read_fields(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        """Return what all settings read; a later one replaces what an earlier one says."""
        fields: dict[str, Any] = {}
        for setting in self.settings:
            fields |= setting.read(content, location)
        return fields

    def write_entries(self, model: ModelConfig) -> dict[str, Any]:
        """Return what all settings write."""
        content: dict[str, Any] = {}
        for setting in self.settings:
            content |= setting.write(model)
        return content
