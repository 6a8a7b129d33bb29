"""What capabilities declare in their modules `settings`: sections of the `Config`, refusals."""

from dataclasses import field, make_dataclass
from typing import Any

from zeropp.errors import InputError
from zeropp.settings.capabilities import declared

CAPABILITIES = "megatron_zpp.capabilities"


def of_capabilities() -> type:
    """Return a dataclass whose fields are the sections of flags in `SECTIONS` of capabilities."""
    sections = declared("SECTIONS", CAPABILITIES)
    fields = [(name, kind, field(default_factory=kind)) for name, kind in sections]
    return make_dataclass("SectionsOfCapabilities", fields, frozen=True, kw_only=True)


def require_none(kind: str, config: Any) -> None:
    """Raise InputError with what capabilities' `kind` of obstacles, text to condition, says."""
    for text, is_met in declared(kind, CAPABILITIES):
        if is_met(config):
            raise InputError(text)
