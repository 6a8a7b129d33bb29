"""The table of families: a row for each `model_type` of Hugging Face that our GPT can be.

A row composes settings (`settings.py`, `layers.py`, `rope.py`, `experts.py`) and the names of
weights (`names.py`).
"""

from typing import Any

from megatron_zpp.interchange.families.dense import DENSE
from megatron_zpp.interchange.families.mixtures import MIXTURES
from zeropp.settings.no_effect_tables import read_toml

FAMILIES = (*DENSE, *MIXTURES)


def why_unsupported(model_type: Any) -> str | None:
    """Return what another type of model has and our GPT does not, by `unsupported.toml`."""
    reasons = read_toml(__package__, "unsupported.toml").items()
    return next((why for why, types in reasons if model_type in types), None)
