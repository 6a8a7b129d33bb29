"""The files of a Hugging Face folder: config.json, and tensors in one safetensors file or several.

Every header is read when the folder is opened, so a truncated file is found before any work; each
tensor opens its file anew, so no more of it stays in memory than that tensor.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_zpp.checkpoint.safetensors_files import DTYPE_NAMES, INDEX, SUFFIX
from megatron_zpp.models.weight_names import TABLES
from megatron_zpp.tokenizer.base import read_json
from zeropp.errors import InputError, first_few

CONFIG = "config.json"
ONE_FILE = f"model{SUFFIX}"
OF_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face's."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; InputError if it cannot be read."""
    content = read_json(folder / CONFIG, "the model's")
    if not isinstance(content, dict):
        raise InputError(f"{folder / CONFIG}: expected an object in braces")
    return content


class FolderTensors:
    """The tensors of a folder by their names in its files.

    Raises InputError for a folder without safetensors, an index that names absent files or other
    tensors than these hold, a file that is cut off or damaged, and numbers of few bits. Constants
    that old versions of transformers saved may be of any type.
    """

    def __init__(self, folder: Path, one_file: str = ONE_FILE) -> None:
        self.place = str(folder)
        self._files: dict[str, Path] = {}
        self._facts: dict[str, Tensor] = {}
        listed = _listed(folder, one_file)
        for path in sorted(set(listed.values())) if listed else [folder / one_file]:
            for name, facts in _header(path).items():
                self._files[name], self._facts[name] = path, facts
        wrong = [name for name in listed if self._files.get(name) != listed[name]]
        wrong += [name for name in self._files if listed and name not in listed]
        if wrong:
            raise InputError(
                f"{folder / (one_file + INDEX)}: {first_few(wrong)}: not where the index says"
            )

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype of the file; InputError for one with NaN."""
        path = self._files[name]
        try:
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: {name} cannot be read ({error})") from error
        if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
            raise InputError(f"{path}: {name} holds NaN or infinity: its weights are no good")
        return tensor


def _listed(folder: Path, one_file: str) -> dict[str, Path]:
    """The file of each tensor by the index; nothing if the folder has one file for all."""
    path = folder / (one_file + INDEX)
    if (folder / one_file).exists():
        return {}
    if not path.exists():
        others = [path.name for suffix in ("*.bin", "*.pt") for path in folder.glob(suffix)]
        hint = f" ({first_few(others)}: save it as safetensors first)" if others else ""
        raise InputError(f"{folder}: neither {one_file} nor {path.name} is in it{hint}")
    content = read_json(path, "the index")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: has no weight_map of tensors and files")
    names = [name for name in weight_map.values() if Path(str(name)).name != name]
    if names:
        raise InputError(f"{path}: {names[0]!r} is not the name of a file beside it")
    absent = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if absent:
        raise InputError(f"{path}: names files that are not there: {first_few(absent)}")
    return {name: folder / file for name, file in weight_map.items()}


def _header(path: Path) -> dict[str, Tensor]:
    """Shape and dtype of each tensor in a file, whose length is checked on the way."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            found = {name: (one.get_shape(), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a whole safetensors file ({error}); fetch it again"
        ) from error
    narrow = [
        f"{name} ({dtype})"
        for name, (_, dtype) in found.items()
        if dtype not in OF_NAME or not (OF_NAME[dtype].is_floating_point or _is_constant(name))
    ]
    if narrow:
        raise InputError(
            f"{path}: {first_few(narrow)}: expected floating-point numbers; dequantize the model "
            "first"
        )
    return {
        name: torch.empty(shape, dtype=OF_NAME[dtype], device="meta")
        for name, (shape, dtype) in found.items()
    }


def _is_constant(name: str) -> bool:
    return any(table.is_constant(name) for table in TABLES.values())
