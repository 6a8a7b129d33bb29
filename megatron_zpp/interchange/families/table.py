"""The table of families: a row for each `model_type` of Hugging Face that our GPT can be.

A row composes settings (`settings.py`, `layers.py`, `rope.py`, `experts.py`) and the names of
weights (`names.py`); defaults of numbers are in `defaults.toml`. A model that several families
could be is exported as the first of them.
"""

from typing import Any

from megatron_zpp.interchange.families.dense import (
    cohere,
    gemma,
    glm,
    gpt,
    llama,
    mistral,
    olmo,
    qwen,
    ungated,
)
from megatron_zpp.interchange.families.mixtures import MIXTURES
from zeropp.settings.no_effect_tables import read_toml

DENSE = (
    gpt.GPT2,
    llama.LLAMA,
    mistral.MISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    llama.PHI3,
    olmo.OLMO2,
    olmo.OLMO3,
    llama.SMOLLM3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gpt.GPT_NEOX,
    gpt.BLOOM,
    llama.INTERNLM3,
    mistral.MINISTRAL,
    mistral.MINISTRAL3,
    qwen.SEED_OSS,
    llama.GRANITE,
    llama.HUNYUAN,
    gemma.GEMMA,
    olmo.OLMO,
    olmo.EXAONE4,
    glm.HELIUM,
    glm.ERNIE4_5,
    glm.GLM,
    glm.GLM4,
    cohere.COHERE,
    cohere.COHERE2,
    cohere.STABLELM,
    ungated.FALCON_NEW,
    ungated.FALCON2,
    ungated.FALCON,
    ungated.STARCODER2,
    ungated.NEMOTRON,
    ungated.APERTUS,
    ungated.NANOCHAT,
)
FAMILIES = (*DENSE, *MIXTURES)


def why_unsupported(model_type: Any) -> str | None:
    """Return what another type of model has and our GPT does not, by `unsupported.toml`."""
    reasons = read_toml(__package__, "unsupported.toml").items()
    return next((why for why, types in reasons if model_type in types), None)
