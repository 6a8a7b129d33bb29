"""adapter_config.json: which layers PEFT adapts, with which ranks and scales."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_zpp.checkpoint.safetensors_files import SUFFIX
from megatron_zpp.interchange.families.settings import MAX_NUMBER
from megatron_zpp.tokenizer.base import read_json
from zeropp.errors import InputError, first_few

CONFIG = "adapter_config.json"
TENSORS = f"adapter_model{SUFFIX}"
BASE = "base_model_name_or_path"
DEFAULT_NUMBER = 8  # PEFT's default of r and of lora_alpha
NUMBERS = (("r", int, "a whole number"), ("lora_alpha", int | float, "a number"))
PATTERNS = (("rank_pattern", *NUMBERS[0][1:]), ("alpha_pattern", *NUMBERS[1][1:]))
# Variants of LoRA that PEFT supports, and that W + (alpha / rank) · B A would not reproduce.
REQUIRED: Mapping[str, Any] = MappingProxyType({"peft_type": "LORA", "bias": "none"})
UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
LIMITS_TARGETS = ("exclude_modules", "layers_to_transform")  # what `target_modules` then means


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What adapters of a PEFT folder are, by the content of adapter_config.json."""

    content: Mapping[str, Any]
    location: str

    def rank(self, target: str) -> int:
        """Return the rank of the adapter of a module or a parameter, named as in its model."""
        return self._number("rank_pattern", target, self.content.get("r", DEFAULT_NUMBER))

    def scaling(self, target: str) -> float:
        """Return what B A of that adapter is multiplied by."""
        default = self.content.get("lora_alpha", DEFAULT_NUMBER)
        rank = self.rank(target)
        divisor = math.sqrt(rank) if self.content.get("use_rslora") else float(rank)
        return self._number("alpha_pattern", target, default) / divisor

    def adapts_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names a parameter."""
        return _ends_with_any(name, self.content.get("target_parameters") or ())

    def adapts_module(self, name: str) -> bool:
        """Whether `target_modules` is a list that names a module, and nothing limits that list."""
        targets = self.content.get("target_modules")
        is_limited = any(self.content.get(key) for key in LIMITS_TARGETS)
        return isinstance(targets, list) and not is_limited and _ends_with_any(name, targets)

    @property
    def version(self) -> tuple[int, ...] | None:
        """The version of PEFT that saved the adapters; None if that is unknown."""
        version = self.content.get("peft_version")
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", version if isinstance(version, str) else "")
        return match and tuple(map(int, match.groups()))

    def _number(self, key: str, target: str, default: float) -> Any:
        for pattern, number in (self.content.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", target):
                return number
        return default


def read_peft_config(folder: Path) -> PeftConfig:
    """Return what adapter_config.json says; raises InputError for anything but plain LoRA."""
    path = folder / CONFIG
    content = read_json(path, "the adapters'")
    problems = [
        f"{key} is {content[key]!r}, not {required!r}"
        for key, required in REQUIRED.items()
        if content.get(key, required) != required
    ]
    problems += [f"{key} is {content[key]!r}" for key in UNSUPPORTED if content.get(key)]
    if problems:
        raise InputError(f"{path}: only plain LoRA is supported: {first_few(problems)}")
    for key, types, expected in NUMBERS:
        _require_number(path, key, content.get(key, DEFAULT_NUMBER), types, expected)
    for key, types, expected in PATTERNS:
        patterns = content.get(key) or {}
        if not isinstance(patterns, dict):
            raise InputError(f"{path}: {key} is {patterns!r}; expected an object")
        for pattern, number in patterns.items():
            _require_number(path, f"{key} of {pattern}", number, types, expected)
            _require_pattern(path, key, pattern)
    parameters = content.get("target_parameters")
    if parameters is not None and not _is_list_of_names(parameters):
        raise InputError(f"{path}: target_parameters is {parameters!r}; expected a list of names")
    base = content.get(BASE)
    if base is not None and not isinstance(base, str):
        raise InputError(f"{path}: {BASE} is {base!r}; expected a name")
    return PeftConfig(content=content, location=str(path))


def shortest_suffixes(adapted: Sequence[str], names: Sequence[str], least: int = 1) -> list[str]:
    """Return the shortest suffixes, of `least` components, that match all `adapted`, no others."""
    others = set(names) - set(adapted)
    excluded = {suffix for name in others for suffix in _suffixes(name)}
    targets = {
        next(suffix for suffix in _suffixes(name)[least - 1 :] if suffix not in excluded)
        for name in adapted
    }
    return sorted(targets)


def _suffixes(name: str) -> list[str]:
    """Return the suffixes of a name that begin after a dot, the shortest first, the name last."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _ends_with_any(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _require_number(path: Path, key: str, value: Any, types: Any, expected: str) -> None:
    is_number = isinstance(value, types) and not isinstance(value, bool)
    if not is_number or not 0 < value < MAX_NUMBER:
        raise InputError(f"{path}: {key} is {value!r}; expected {expected} above 0")


def _require_pattern(path: Path, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"{path}: {key}: {pattern!r} is no regular expression: {error}") from error


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
