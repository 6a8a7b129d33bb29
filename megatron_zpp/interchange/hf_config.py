"""Hugging Face's config.json and our ModelConfig, converted in both directions.

One table serves both, with a row for each family of models (`families/families.toml`). A
setting that the other side cannot express is refused with an error that names it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_zpp.checkpoint.training_state import architecture
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.names import CAPABILITIES
from megatron_zpp.interchange.families.settings import Number
from megatron_zpp.interchange.families.table import FAMILIES, why_unsupported
from megatron_zpp.settings.config import Config, ModelConfig
from megatron_zpp.settings.gpt.layer_pattern import MAX_LAYERS, pattern_text, window_text
from zeropp.errors import InputError
from zeropp.settings import declared, settings_of

QUANTIZATION = "quantization_config"
ADDED_BIASES = ("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """The content of a config.json: the family, our ModelConfig, and the vocabulary's rows.

    `further_layers` are those that predict further tokens (MTP), which our model leaves out.
    """

    family: Family
    model: ModelConfig
    vocab_rows: int
    further_layers: int = 0


def parse_config(content: Mapping[str, Any], location: str) -> HuggingFaceConfig:
    """Convert the content of a config.json; `location` is named in errors.

    The model's `seq_length` is the largest it supports, and its dropouts are those of the file.
    Raises InputError for an unsupported kind of model, for a setting that our model cannot have,
    and for values of a wrong type.
    """
    family = _family(content, location)
    method = quantization_of(content)
    if method is not None and method not in family.packed_weights:
        raise InputError(
            f"{location}: {QUANTIZATION}: quantized weights ({method}) are not supported; "
            "dequantize them"
        )
    vocab_size = Number("vocab_size", "vocab_size", family.vocab_size)
    return HuggingFaceConfig(
        family=family,
        model=_read_model(family, content, location),
        vocab_rows=vocab_size.value(content, location),
        further_layers=_further_layers(family, content, location),
    )


def quantization_of(content: Mapping[str, Any]) -> str | None:
    """Return the method by which a config.json says that weights are quantized, None if not."""
    quantization = content.get(QUANTIZATION)
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return str(method or "unknown")


def family_of(model: ModelConfig) -> Family:
    """Return the family that our model can be exported as.

    Raises InputError, with the settings that rule out each family, if there is none.
    """
    reasons = []
    for family in FAMILIES:
        differences = _differences(model, family)
        if not differences:
            return family
        reasons.append(f"  {family.name}: {'; '.join(differences)}")
    raise InputError(
        "the model is of none of the Hugging Face families that are supported:\n"
        + "\n".join(reasons)
    )


def build_config(model: ModelConfig, vocab_rows: int, eod: int) -> dict[str, Any]:
    """Return the content of a config.json for our model; `eod` is the end-of-document id.

    Raises InputError for a model that no supported family can express.
    """
    family = family_of(model)
    content = {"architectures": [family.class_name], "model_type": family.name}
    content |= family.write_entries(_canonical(model))
    # The defaults of some families are tokens beyond the vocabulary.
    tokens = {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None}
    content |= {"vocab_size": vocab_rows, **tokens}
    return content if family.further_layers is None else {**content, family.further_layers: 0}


def comparable(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that the weights depend on, equal for models that compute the same.

    The padding of the vocabulary is left out.
    """
    return architecture(replace(_canonical(model), make_vocab_size_divisible_by=1), 0)


def _family(content: Mapping[str, Any], location: str) -> Family:
    model_type = content.get("model_type")
    class_names = content.get("architectures") or []
    if not isinstance(class_names, list):
        raise InputError(f"{location}: architectures is {class_names!r}; expected a list of names")
    for family in FAMILIES:
        if family.is_meant(content):
            return family
    supported = ", ".join(f"{family.name} ({family.class_name})" for family in FAMILIES)
    classes = f" ({', '.join(map(str, class_names))})" if class_names else ""
    missing = why_unsupported(model_type)
    reason = f": it has {missing}, which this program does not have" if missing else ""
    raise InputError(
        f"{location}: a model of type {model_type!r}{classes} is not supported{reason}; supported "
        f"are {supported}"
    )


def _further_layers(family: Family, content: Mapping[str, Any], location: str) -> int:
    if family.further_layers is None:
        return 0
    number = content.get(family.further_layers, 1)
    if not isinstance(number, int) or not 0 <= number < MAX_LAYERS:
        raise InputError(f"{location}: {family.further_layers} is {number!r}; expected a number")
    return number


def _read_model(family: Family, content: Mapping[str, Any], location: str) -> ModelConfig:
    fields = family.read_fields(content, location)
    fields["seq_length"] = fields["max_position_embeddings"]
    try:
        model = ModelConfig(**_without_redundant_values(fields))
        model.check()
    except InputError as error:
        raise InputError(f"{location}: {error}") from error
    return model


def _differences(model: ModelConfig, family: Family) -> list[str]:
    """Return what is lost of our model when it is written as a family's config.json and read."""
    try:
        again = comparable(
            _read_model(family, family.write_entries(_canonical(model)), family.name)
        )
    except InputError as error:
        return [str(error).removeprefix(f"{family.name}: ")]
    again = asdict(ModelConfig()) | again
    return [
        f"{name} is {value}, not {again.get(name)}"
        for name, value in comparable(model).items()
        if again.get(name) != value
    ]


def _canonical(model: ModelConfig) -> ModelConfig:
    """Return the model with equal settings for equal computations.

    Settings without an effect have their defaults, and the tanh form of GELU has one name.
    """
    config = Config(model=model)
    fields = {entry.name: getattr(model, entry.name) for entry in settings_of(ModelConfig)}
    fields |= {
        entry.name: entry.default
        for entry in settings_of(ModelConfig)
        if entry.why_no_effect(config)
    }
    fields["bias_gelu_fusion"] |= fields["openai_gelu"]
    fields |= {"openai_gelu": False, "ffn_hidden_size": model.ffn_size}
    filled = ModelConfig(**fields)
    for fields_of in (_canonical_layers, *declared("CANONICAL", CAPABILITIES)):
        fields |= fields_of(filled)
    return ModelConfig(**_without_redundant_values(fields))


def _canonical_layers(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that concern only some layers, each in its canonical spelling."""
    windows, without_rope = model.windows, model.layers_without_rope
    window = max((each for each in windows if each is not None), default=None)
    marks = [each is not None for each in windows]
    pattern = None if all(marks) or not window else pattern_text(marks, nth=False)
    has_factor = model.rotary_seq_len_interpolation_factor > 1
    is_scaled = model.use_rope_scaling or has_factor or model.rope_type == "yarn"
    is_same_base = model.rotary_base_local == model.rotary_base and not is_scaled
    return {
        "window_size": window and window_text(window),
        "window_attn_skip_freq": pattern,
        "no_rope_freq": pattern_text(without_rope) if any(without_rope) else None,
        "rotary_base_local": None if is_same_base or not window else model.rotary_base_local,
    }


def _without_redundant_values(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with values that restate a default reset, so that equal models compare.

    The width of the MLP, which has several defaults, is filled in instead.
    """
    fields = dict(fields)
    if all(fields.get(name) for name in ADDED_BIASES):
        fields["disable_bias_linear"] = False
    if not fields.get("disable_bias_linear"):
        fields |= dict.fromkeys(ADDED_BIASES, False)
    heads, hidden_size = fields["num_attention_heads"], fields["hidden_size"]
    head_dim = fields.get("kv_channels")
    if fields.get("num_query_groups") == heads:
        fields["num_query_groups"] = None
    if head_dim is not None and head_dim * heads == hidden_size:
        fields["kv_channels"] = None
    if fields.get("query_pre_attn_scalar") == (head_dim or hidden_size // heads):
        fields["query_pre_attn_scalar"] = None
    if fields.get("ffn_hidden_size") is None:
        fields["ffn_hidden_size"] = 4 * hidden_size
    return fields
