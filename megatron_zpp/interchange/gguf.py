"""Models in a .gguf file, which transformers reads and dequantizes to fp32, all in memory."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.interchange.hf_config import QUANTIZATION
from megatron_zpp.tokenizer.base import load_package
from zeropp.errors import InputError

SUFFIX = ".gguf"
PACKAGES = ("gguf", "accelerate", "transformers")
DROPPED_KEYS = (QUANTIZATION, "_name_or_path", "_model_name_or_path")


class GgufModel:
    """The tensors of a .gguf file under Hugging Face's names, its settings and its tokenizer.

    Raises InputError if a package is missing, and for a file that transformers cannot read.
    """

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        for package in PACKAGES:
            transformers = load_package(package, f"reading {path.name}")
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        file = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(**file)
        # A damaged file can make the libraries raise anything.
        except Exception as error:
            kind = type(error).__name__
            raise InputError(f"{path}: transformers cannot read it ({kind}: {error})") from error
        self._generation_config = model.generation_config
        entries = model.config.to_dict()
        self.config: dict[str, Any] = {
            key: value for key, value in entries.items() if key not in DROPPED_KEYS
        }
        self.config["architectures"] = [type(model).__name__]
        self._tensors = model.state_dict()
        if model.config.tie_word_embeddings:
            self._tensors.pop("lm_head.weight", None)

    def facts(self) -> dict[str, Tensor]:
        """Return every tensor's shape and dtype by name, as tensors on the meta device."""
        return {name: tensor.to("meta") for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU, in fp32."""
        return self._tensors[name]

    def save_tokenizer(self, folder: Path) -> None:
        """Write the files of the tokenizer and generation_config.json into `folder`."""
        self._tokenizer.save_pretrained(folder)
        self._generation_config.save_pretrained(folder)
