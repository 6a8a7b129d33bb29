"""The adapters of a PEFT folder, to be merged into the weights of our GPT.

Queries, keys and values are one layer in our model and may be several in Hugging Face's, each with
an A of its own, or share one. Such adapters can only be merged.
"""

from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.capabilities.lora.merged_weights import WEIGHT
from megatron_zpp.capabilities.lora.settings import A, B
from megatron_zpp.checkpoint.weight_source import parameter_shapes
from megatron_zpp.interchange.adapters.fused_parameters import (
    FusedParameter,
    adapted_in_module,
    fused_parameters,
    is_fused,
    require_layout,
)
from megatron_zpp.interchange.adapters.peft_config import CONFIG, TENSORS, read_peft_config
from megatron_zpp.interchange.converted_weights import joined_parts, split_by_name
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.families.names import NameRow, NameTable
from megatron_zpp.interchange.hf_folder import FolderTensors
from zeropp.errors import InputError, first_lines

PREFIX = "base_model.model."  # of names, from PEFT's wrapper modules


def is_peft(folder: Path) -> bool:
    """Whether a folder holds adapters of PEFT's."""
    return (folder / CONFIG).is_file()


def module_names(row: NameRow) -> list[str]:
    """Return Hugging Face's modules whose weights are in a row; none for a bias."""
    return [name.removesuffix(WEIGHT) for name in row.hf_names if name.endswith(WEIGHT)]


def adapter_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of the A and B of one of Hugging Face's modules."""
    return f"{PREFIX}{module}.{A}{WEIGHT}", f"{PREFIX}{module}.{B}{WEIGHT}"


class PeftAdapters:
    """The adapters of a PEFT folder by the names of our GPT's layers.

    Some layers may have adapters as modules or as fused parameters. Raises InputError for a damaged
    folder, for anything beyond plain LoRA, and for tensors that are not adapters of the model's
    layers, which it lists.
    """

    def __init__(self, folder: Path, table: NameTable, sizes: Sizes) -> None:
        self.location, self._sizes = str(folder), sizes
        self._config = read_peft_config(folder)
        self._tensors = FolderTensors(folder, TENSORS)
        self._facts = self._tensors.facts()
        self._weights = {  # the weights that can have adapters, on the meta device
            name.removesuffix(WEIGHT): parameter
            for name, parameter in parameter_shapes(sizes.model, sizes.padded_rows).items()
            if name.startswith("blocks.") and parameter.ndim == 2
        }
        self._rows = {layer: table.row(layer + WEIGHT, sizes.model) for layer in self._weights}
        tensors = split_by_name(self._weights, self._rows, sizes)
        shapes = {
            name.removesuffix(WEIGHT): joined_parts(parts).shape for name, parts in tensors.items()
        }
        self._shapes = {module: shape for module, shape in shapes.items() if len(shape) == 2}
        parameters = fused_parameters(sizes.model, table)
        self._fused: dict[str, FusedParameter] = {}  # by our layers
        self._wrappers: dict[FusedParameter, str] = {}
        for parameter, adapted in adapted_in_module(parameters, self._config).items():
            self._fused |= dict.fromkeys(parameter.layers, parameter)
            self._wrappers[parameter] = parameter.wrapper(adapted)
        self._transposed: dict[FusedParameter, bool] = {}
        self._check()
        self.layers = [layer for layer in self._rows if self._has_adapter(layer)]

    def weight_shape(self, layer: str) -> torch.Size:
        """Return the shape [out, in] of the layer's weight."""
        return self._weights[layer].shape

    def weight_delta(self, layer: str) -> Tensor:
        """Return what the adapters add to the layer's weight, fp32 [out, in]."""
        if layer in self._fused:
            return self._fused_delta(layer, self._fused[layer])
        row = self._rows[layer]
        deltas = [
            self._module_delta(module, row.form.is_transposed) for module in module_names(row)
        ]
        return row.form.join(deltas, self._sizes).contiguous()

    def _fused_delta(self, layer: str, parameter: FusedParameter) -> Tensor:
        lora_a, lora_b = self._pair(self._wrappers[parameter])
        is_transposed = self._transposed[parameter]
        delta = parameter.delta(layer, lora_a, lora_b, is_transposed=is_transposed)
        return delta * self._config.scaling(parameter.target)

    def _module_delta(self, module: str, is_transposed: bool) -> Tensor:
        if not self._is_there(module):
            return torch.zeros(self._shapes[module])
        lora_a, lora_b = self._pair(module)
        delta = lora_b @ lora_a * self._config.scaling(self._target(module))
        return delta.T if is_transposed else delta

    def _pair(self, module: str) -> tuple[Tensor, Tensor]:
        lora_a, lora_b = (self._tensors.read(name).float() for name in adapter_names(module))
        return lora_a, lora_b

    def _target(self, module: str) -> str:
        """Return what PEFT's settings name to adapt a module: it, or its weight."""
        is_parameter = self._config.adapts_parameter(module + WEIGHT)
        return module + WEIGHT if is_parameter else module

    def _is_there(self, module: str) -> bool:
        return adapter_names(module)[0] in self._facts

    def _has_adapter(self, layer: str) -> bool:
        if layer in self._fused:
            return True
        return any(map(self._is_there, module_names(self._rows[layer])))

    def _check(self) -> None:
        modules = set(self._shapes)
        expected_shapes: dict[str, list[int]] = {}
        lines = []
        for layer, row in self._rows.items():
            # Under transformers 5 names of modules do not mean those in fused parameters.
            is_module = not is_fused(layer) or self._has_adapter(layer)
            for module in filter(modules.__contains__, module_names(row)):
                shape, rank = self._shapes[module], self._config.rank(self._target(module))
                num_rows, num_columns = reversed(shape) if row.form.is_transposed else shape
                pair = adapter_names(module)
                expected_shapes |= zip(pair, ([rank, num_columns], [num_rows, rank]), strict=True)
                is_adapted = is_module and self._is_adapted(module)
                if is_adapted or self._facts.keys() & {*pair}:
                    lines += [f"missing: {name}" for name in pair if name not in self._facts]
        for parameter in self._wrappers:
            lines += self._problems_of(parameter, expected_shapes)
        for name, facts in self._facts.items():
            if name not in expected_shapes:
                lines.append(f"extra: {name}")
            elif list(facts.shape) != expected_shapes[name]:
                shape = f"{list(facts.shape)}, expected {expected_shapes[name]}"
                lines.append(f"{name} has shape {shape}")
        if lines or not self._facts:
            raise InputError(
                f"{self.location}: its tensors are not adapters of the model's layers:\n  "
                f"{first_lines(lines)}"
            )

    def _is_adapted(self, module: str) -> bool:
        config = self._config
        return config.adapts_module(module) or config.adapts_parameter(module + WEIGHT)

    def _problems_of(
        self, parameter: FusedParameter, expected_shapes: dict[str, list[int]]
    ) -> list[str]:
        """Return what is wrong with the adapter of a parameter; note the shapes of its tensors."""
        pair = adapter_names(self._wrappers[parameter])
        lines = [f"missing: {name}" for name in pair if name not in self._facts]
        is_transposed = None
        if not lines:
            lora_a, lora_b = (self._facts[name] for name in pair)
            is_transposed = require_layout(parameter, lora_a, lora_b, self._config)
        self._transposed[parameter] = bool(is_transposed)
        rank = self._config.rank(parameter.target)
        shapes = parameter.shapes(rank, is_transposed=bool(is_transposed))
        expected_shapes |= zip(pair, shapes, strict=True)
        for layer in parameter.layers:
            others = filter(self._is_there, module_names(self._rows[layer]))
            lines += map(parameter.conflict, others)
        return lines
