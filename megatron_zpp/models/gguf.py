"""Models in a .gguf file, read and dequantized to fp32 by transformers; this holds all of it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.models.hf_config import QUANTIZED
from megatron_zpp.tokenizer.base import load_package
from zeropp.errors import InputError

SUFFIX = ".gguf"
PACKAGES = ("gguf", "accelerate", "transformers")


class GgufModel:
    """The tensors of a .gguf under Hugging Face's names, its settings and its tokenizer.

    Raises InputError if a package is missing, or for a file that transformers cannot read.
    """

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        needed_by = f"reading {path.name}"
        transformers = [load_package(package, needed_by) for package in PACKAGES][-1]
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        # The libraries raise whatever a damaged file leads them to.
        except Exception as error:
            kind = type(error).__name__
            raise InputError(f"{path}: transformers cannot read it ({kind}: {error})") from error
        self._generation = model.generation_config
        self.config: dict[str, Any] = {
            name: value
            for name, value in model.config.to_dict().items()
            if name not in (QUANTIZED, "_name_or_path", "_model_name_or_path")
        }
        self.config["architectures"] = [type(model).__name__]
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        self._tensors = {
            name: tensor for name, tensor in model.state_dict().items() if name not in tied
        }

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""
        return {name: tensor.to("meta") for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, fp32."""
        return self._tensors[name]

    def save_tokenizer(self, folder: Path) -> None:
        """Write the files of the tokenizer and the settings of generation into `folder`."""
        self._tokenizer.save_pretrained(folder)
        self._generation.save_pretrained(folder)
