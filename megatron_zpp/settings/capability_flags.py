"""The flags that capabilities declare in their modules `settings`, as sections of the `Config`."""

from dataclasses import field, make_dataclass

from zeropp.settings import declared

CAPABILITIES = "megatron_zpp.capabilities"


def of_capabilities() -> type:
    """Return a dataclass whose fields are the sections of flags in `SECTIONS` of capabilities.

    Its bases are the classes in `FACTS`, which say what follows from these.
    """
    sections = declared("SECTIONS", CAPABILITIES)
    fields = [(name, kind, field(default_factory=kind)) for name, kind in sections]
    facts = tuple(declared("FACTS", CAPABILITIES))
    return make_dataclass("SectionsOfCapabilities", fields, bases=facts, frozen=True, kw_only=True)
