"""Settings of a family's config.json that concern only some layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.interchange.families.settings import Number
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.settings.gpt.layer_pattern import marks_of, pattern_text, window_text
from zeropp.errors import InputError

WINDOW, FULL = "sliding_attention", "full_attention"
NUM_LAYERS = Number("num_hidden_layers", "num_layers")


@dataclass(frozen=True, kw_only=True)
class Window:
    """The window of attention: `sliding_window`, and which layers have it.

    `switch` is a key that must be true for a window. With `has_types` the key `layer_types` names
    the kind of each layer; without the key every `full_every`-th layer has no window, by the key
    `full_every_key` if it is there, or the first ones, as many as `num_full_key` says.
    """

    default: int | None = None
    switch: str | None = None
    has_types: bool = False
    full_every: int | None = None
    full_every_key: str = ""
    num_full_key: str = ""
    default_num_full: int = 0

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        number = Number("sliding_window", "window_size", self.default)
        is_off = self.switch is not None and not content.get(self.switch, False)
        if is_off or content.get(number.key, number.default) is None:
            return {}
        window = number.value(content, location)
        if self.has_types and content.get("layer_types") is not None:
            marks = self._marks(content["layer_types"], location)
        elif self.num_full_key:
            num_layers = NUM_LAYERS.value(content, location) or 0
            num_full = content.get(self.num_full_key, self.default_num_full)
            if not isinstance(num_full, int):
                raise InputError(f"{location}: {self.num_full_key} is {num_full!r}; not a number")
            marks = [layer >= num_full for layer in range(num_layers)]
        else:
            every = content.get(self.full_every_key, self.full_every)
            frequency = None if every is None else str(every)
            return {"window_size": window_text(window), "window_attn_skip_freq": frequency}
        if not any(marks):
            return {}
        pattern = pattern_text(marks, nth=False)
        return {"window_size": window_text(window), "window_attn_skip_freq": pattern}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        windows = model.windows
        window = max((each for each in windows if each is not None), default=None)
        content: dict[str, Any] = {} if self.switch is None else {self.switch: window is not None}
        if self.has_types:
            content["layer_types"] = [FULL if each is None else WINDOW for each in windows]
        if window is None and self.has_types and self.switch is None:
            window = model.num_positions  # transformers wants a number where no layer uses it
        return content | {"sliding_window": window}

    def _marks(self, layer_types: Any, location: str) -> list[bool]:
        if not isinstance(layer_types, list) or not set(layer_types) <= {WINDOW, FULL}:
            raise InputError(
                f"{location}: layer_types is {layer_types!r}; only lists of {WINDOW} and {FULL} "
                "are supported"
            )
        return [kind == WINDOW for kind in layer_types]


@dataclass(frozen=True, kw_only=True)
class RopeInWindows(Window):
    """Layers without a window have no rotary positions, unless `sliding_window` is null.

    That is refused where it may not be null.
    """

    may_be_null: bool = True

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        fields = super().read(content, location)
        if content.get("sliding_window", self.default) is None:
            if not self.may_be_null:
                raise InputError(f"{location}: sliding_window is None; expected a number")
            return fields
        num_layers = NUM_LAYERS.value(content, location) or 0
        if "window_size" not in fields:
            return {"no_rope_freq": "1"}
        pattern = fields["window_attn_skip_freq"]
        has_window = marks_of(pattern, num_layers, f"{location}: windows", nth=False)
        marks = [not each for each in has_window]
        return fields | {"no_rope_freq": pattern_text(marks) if any(marks) else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        content = super().write(model)
        has_rope_only = not any(model.windows) and not any(model.layers_without_rope)
        return content | ({"sliding_window": None} if has_rope_only else {})


@dataclass(frozen=True)
class LayersWithoutRope:
    """Layers without rotary positions: `no_rope_layers`, a list with a 0 for each of them.

    Without the key it is every N-th layer, by `no_rope_layer_interval`.
    """

    default: int

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        has_rope = content.get("no_rope_layers")
        if has_rope is None:
            interval = Number("no_rope_layer_interval", "no_rope_freq", self.default)
            return {"no_rope_freq": str(interval.value(content, location))}
        if not isinstance(has_rope, list) or any(each not in (0, 1) for each in has_rope):
            raise InputError(f"{location}: no_rope_layers is {has_rope!r}; expected a list of 0, 1")
        marks = [not each for each in has_rope]
        return {"no_rope_freq": pattern_text(marks) if any(marks) else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"no_rope_layers": [int(not without) for without in model.layers_without_rope]}
