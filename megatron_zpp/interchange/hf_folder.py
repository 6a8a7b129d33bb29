"""The files of a Hugging Face folder: config.json, and tensors in one safetensors file or several.

Every header is read when the folder is opened, so a truncated file is noticed at the start. Each
tensor opens its file anew, so that memory holds only that tensor. Of a model of texts and images
the settings and the tensors are those of its language model, under the names of that alone.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_zpp.checkpoint.open_model import HF_CONFIG as CONFIG
from megatron_zpp.checkpoint.safetensors_files import DTYPE_NAMES, INDEX, SUFFIX
from megatron_zpp.interchange.families.table import FAMILIES
from megatron_zpp.interchange.hf_config import HuggingFaceConfig, parse_config
from megatron_zpp.tokenizer.base import read_json
from zeropp.atomic import write_atomically
from zeropp.errors import InputError, first_few

ONE_FILE = f"model{SUFFIX}"
BYTE = "U8"
DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


# Types of models of texts and images: their class, and the default type of their language model.
TEXT_PARTS = MappingProxyType(
    {
        "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
        "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
    }
)
TEXT_PREFIXES = MappingProxyType({"language_model.": "", "model.language_model.": "model."})
IMAGE_MODULE = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
OF_ALL_PARTS = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")

log = logging.getLogger("megatron_zpp")


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, or what it would be for the language model alone.

    Raises InputError if it cannot be read.
    """
    content = read_json(folder / CONFIG, "the model's")
    class_name, default_type = TEXT_PARTS.get(content.get("model_type"), (None, None))
    if class_name is None or class_name not in content.get("architectures", (class_name,)):
        return content
    text = content.get("text_config")
    if not isinstance(text, dict):
        raise InputError(f"{folder / CONFIG}: text_config is {text!r}; expected an object")
    model_type = text.get("model_type", default_type)
    classes = [family.class_name for family in FAMILIES if family.name == model_type]
    common = {key: content[key] for key in OF_ALL_PARTS if key in content}
    return {**text, **common, "model_type": model_type, "architectures": classes[:1]}


def read_model(folder: Path) -> HuggingFaceConfig:
    """Return what config.json says; raises InputError for a model that is not supported."""
    return parse_config(read_config(folder), str(folder / CONFIG))


def write_json(path: Path, content: Mapping[str, Any], *, ensure_ascii: bool = True) -> None:
    """Write an object to a JSON file, complete or not at all."""
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=ensure_ascii) + "\n")


class FolderTensors:
    """The tensors of a folder by their names in its files.

    Raises InputError for a folder without safetensors, an index that names absent files or other
    tensors than the files hold, a truncated or damaged file, and numbers that are not floating
    point. Constants that old versions of transformers saved may be of any type, and with `packed`
    bytes are numbers too.
    """

    def __init__(self, folder: Path, one_file: str = ONE_FILE, *, packed: bool = False) -> None:
        self.location = str(folder)
        self._files: dict[str, Path] = {}
        self._facts: dict[str, Tensor] = {}
        indexed_files = _read_index(folder, one_file)
        paths = sorted(set(indexed_files.values())) or [folder / one_file]
        for path in paths:
            for name, facts in _read_header(path, packed=packed).items():
                self._files[name] = path
                self._facts[name] = facts
        if indexed_files:
            names = [*indexed_files, *(name for name in self._files if name not in indexed_files)]
            misplaced = [name for name in names if self._files.get(name) != indexed_files.get(name)]
            if misplaced:
                raise InputError(
                    f"{folder / (one_file + INDEX)}: {first_few(misplaced)}: not where the index "
                    "says"
                )
        self._names = _text_names(self._facts, self.location)

    def facts(self) -> dict[str, Tensor]:
        """Return every tensor's shape and dtype by name, as tensors on the meta device."""
        return {name: self._facts[in_file] for name, in_file in self._names.items()}

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU, in the dtype of the file.

        Raises InputError for a tensor that holds NaN or infinity.
        """
        in_file = self._names[name]
        path = self._files[in_file]
        try:
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(in_file)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: {name} cannot be read ({error})") from error
        if tensor.numel() and not all(extreme.isfinite() for extreme in tensor.aminmax()):
            raise InputError(f"{path}: {name} holds NaN or infinity: the weights are unusable")
        return tensor


def _text_names(in_files: Iterable[str], location: str) -> dict[str, str]:
    """Return the names that a language model's tensors have alone, and those in the files."""
    in_files = tuple(in_files)
    if not any(name.startswith(tuple(TEXT_PREFIXES)) for name in in_files):
        return dict(zip(in_files, in_files, strict=True))
    kept = [name for name in in_files if not IMAGE_MODULE.match(name)]
    if len(kept) < len(in_files):
        left_out = len(in_files) - len(kept)
        log.info("%s: %d tensors that read images are left out", location, left_out)
    names = {}
    for in_file in kept:
        prefix = next((each for each in TEXT_PREFIXES if in_file.startswith(each)), "")
        names[TEXT_PREFIXES.get(prefix, "") + in_file.removeprefix(prefix)] = in_file
    return names


def _read_index(folder: Path, one_file: str) -> dict[str, Path]:
    """Return the file of each tensor by the index; empty if the folder has one file for all."""
    path = folder / (one_file + INDEX)
    if (folder / one_file).exists():
        return {}
    if not path.exists():
        others = [other.name for suffix in ("*.bin", "*.pt") for other in folder.glob(suffix)]
        hint = f" ({first_few(others)}: save it as safetensors first)" if others else ""
        raise InputError(f"{folder}: neither {one_file} nor {path.name} is in it{hint}")
    weight_map = read_json(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: has no weight_map from tensors to files")
    for file_name in weight_map.values():
        if Path(str(file_name)).name != file_name:
            raise InputError(f"{path}: {file_name!r} is not the name of a file beside it")
    absent = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if absent:
        raise InputError(f"{path}: names files that are not there: {first_few(absent)}")
    return {name: folder / file_name for name, file_name in weight_map.items()}


def _read_header(path: Path, *, packed: bool) -> dict[str, Tensor]:
    """Return each tensor's shape and dtype, on the meta device; opening checks the file's size."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            header = {
                name: (tensor.get_shape(), tensor.get_dtype()) for name, tensor in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a whole safetensors file ({error}); download it again"
        ) from error
    unsupported = [
        f"{name} ({dtype})"
        for name, (_, dtype) in header.items()
        if not (packed and dtype == BYTE) and not _is_supported(name, DTYPE_OF_NAME.get(dtype))
    ]
    if unsupported:
        raise InputError(
            f"{path}: {first_few(unsupported)}: expected floating-point numbers; dequantize the "
            "model first"
        )
    return {
        name: torch.empty(shape, dtype=DTYPE_OF_NAME[dtype], device="meta")
        for name, (shape, dtype) in header.items()
    }


def _is_supported(name: str, dtype: torch.dtype | None) -> bool:
    if dtype is None:
        return False
    return dtype.is_floating_point or any(family.names.is_constant(name) for family in FAMILIES)
