"""Open a model in any format: our checkpoints, a Hugging Face folder, a PEFT folder, a .gguf file.

LoRA adapters in a PEFT folder are opened as their base model with the adapters merged.
"""

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from megatron_zpp.capabilities.lora.merged_weights import MergedWeights
from megatron_zpp.checkpoint.iteration_folders import require_own
from megatron_zpp.checkpoint.open_model import OpenedModel, is_checkpoint, open_checkpoint
from megatron_zpp.interchange import gguf
from megatron_zpp.interchange.adapters import peft_config
from megatron_zpp.interchange.adapters.peft_adapters import PeftAdapters, is_peft
from megatron_zpp.interchange.converted_weights import ConvertedWeights, TensorFiles
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.hf_config import Family, family_of, parse_config
from megatron_zpp.interchange.hf_folder import (
    CONFIG,
    is_hugging_face,
    read_config,
    read_model,
    write_json,
)
from megatron_zpp.interchange.mxfp4 import tensors_of
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import ModelConfig, TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer, tokenizer_config_of
from zeropp.errors import InputError

VOCAB_MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # tried in this order; the default first

log = logging.getLogger("megatron_zpp")


def open_model(
    folder: Path | str,
    tokenizer_config: TokenizerConfig | None = None,
    vocab_multiple: int | None = None,
    base: Path | str | None = None,
) -> OpenedModel:
    """Open a folder of checkpoints or one of them, a Hugging Face or PEFT folder, or a .gguf file.

    All ranks call it. `tokenizer_config` replaces the tokenizer that the model comes with. The
    vocabulary of a Hugging Face model is padded to a multiple of `vocab_multiple`; None adds no
    rows. `base` replaces the recorded base model of adapters. Raises InputError for anything else,
    for damaged files, for unsupported models, and for parts that do not fit together.
    """
    path = Path(folder)
    if is_peft(path):
        return _open_peft(path, tokenizer_config, vocab_multiple, base)
    is_gguf = path.suffix == gguf.SUFFIX
    if is_gguf or is_hugging_face(path):
        if base is not None:
            raise InputError(f"{path}: is a whole model without adapters: leave --base out")
        if is_gguf:
            return _open_gguf(path, tokenizer_config, vocab_multiple)
        tensors = tensors_of(path, read_config(path))
        return _open_hugging_face(path, path, tensors, tokenizer_config, vocab_multiple)
    if is_checkpoint(path):
        return open_checkpoint(path, tokenizer_config, base, open_model)
    require_own(path, (), "the model")
    raise InputError(
        f"{path}: expected a folder of checkpoints (iter_0000100 in it), a Hugging Face folder "
        f"({CONFIG} in it), a PEFT folder ({peft_config.CONFIG} in it) or a .gguf file"
    )


def load_model(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tokenizer_config: TokenizerConfig | None = None,
    base: Path | str | None = None,
) -> tuple[GPT, Tokenizer]:
    """Return the whole GPT on one device, in eval mode, and its tokenizer.

    See `open_model` for `tokenizer_config`, `base` and the errors.
    """
    opened = open_model(folder, tokenizer_config, base=base)
    with torch.device("meta"):
        model = GPT(opened.config, opened.tokenizer.vocab_size)
    model = model.to(dtype).to_empty(device=device)
    opened.fill(model)
    return model.eval(), opened.tokenizer


def family_of_opened(opened: OpenedModel) -> Family:
    """Return the Hugging Face family that a model is of, or can be exported as.

    Raises InputError if there is none.
    """
    return read_model(opened.origin).family if opened.origin else family_of(opened.config)


def adapter_sizes(opened: OpenedModel) -> Sizes:
    """Return the sizes for converting adapters, which never have rows of the vocabulary."""
    rows = opened.padded_vocab_size
    return Sizes(model=opened.config, vocab_rows=rows, padded_rows=rows)


def _open_peft(
    path: Path,
    tokenizer_config: TokenizerConfig | None,
    vocab_multiple: int | None,
    base_folder: Path | str | None,
) -> OpenedModel:
    base_name = peft_config.read_peft_config(path).content.get(peft_config.BASE)
    if base_folder is not None:
        folder = Path(base_folder)
        problem = f"--base {base_folder}: there is no model"
    else:
        folder = Path(base_name or "")
        problem = (
            f"{path}: its base model {base_name!r} is not a folder here: name the one it is in "
            "(--base FOLDER)"
        )
    is_named = bool(base_folder or base_name)
    if not is_named or not folder.exists() or folder.resolve() == path.resolve():
        raise InputError(problem)
    try:
        base = open_model(folder, tokenizer_config, vocab_multiple)
    except RecursionError:
        raise InputError(f"{path}: its base model {base_name!r} leads back to it") from None
    adapters = PeftAdapters(path, family_of_opened(base).names, adapter_sizes(base))
    return replace(base, path=path, weights=MergedWeights(base.weights, adapters), base=base.path)


def _open_gguf(
    path: Path, tokenizer_config: TokenizerConfig | None, vocab_multiple: int | None
) -> OpenedModel:
    model, files = gguf.GgufModel(path), tempfile.TemporaryDirectory()
    origin = Path(files.name)
    model.save_tokenizer(origin)
    write_json(origin / CONFIG, model.config)
    opened = _open_hugging_face(path, origin, model, tokenizer_config, vocab_multiple)
    return replace(opened, files=files)


def _open_hugging_face(
    path: Path,
    origin: Path,
    tensors: TensorFiles,
    tokenizer_config: TokenizerConfig | None,
    vocab_multiple: int | None,
) -> OpenedModel:
    """Open a model by its tensors and a folder with its config.json and perhaps its tokenizer."""
    hf_config = parse_config(
        read_config(origin), str(path / CONFIG) if path.is_dir() else str(path)
    )
    tokenizer_config = tokenizer_config or tokenizer_config_of(origin)
    if tokenizer_config is None:
        log.info("%s has no tokenizer: token ids are numbers (NullTokenizer)", path)
        tokenizer_config = TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=hf_config.vocab_rows
        )
    tokenizer = build_tokenizer(tokenizer_config)
    rows = hf_config.vocab_rows
    model = with_padding(hf_config.model, rows, tokenizer.vocab_size, vocab_multiple, path)
    sizes = Sizes(
        model=model,
        vocab_rows=rows,
        padded_rows=model.padded_vocab_size(tokenizer.vocab_size),
        further_layers=hf_config.further_layers,
    )
    return OpenedModel(
        path=path,
        config=model,
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config,
        weights=ConvertedWeights(tensors, hf_config.family.names, sizes),
        origin=origin,
    )


def with_padding(
    model: ModelConfig, rows: int, num_entries: int, vocab_multiple: int | None, path: Path
) -> ModelConfig:
    """Return the model with a padding that turns the tokenizer's entries into `rows` of vocabulary.

    The softmax is then over the same rows as in the model at `path`. A larger `vocab_multiple`
    adds rows of zeros. Raises InputError for fewer rows than the model has.
    """
    if num_entries > rows:
        raise InputError(
            f"{path}: the tokenizer has {num_entries} entries, but the model only {rows} rows for "
            "them"
        )
    multiples = (*VOCAB_MULTIPLES, rows) if vocab_multiple is None else (vocab_multiple,)
    for multiple in multiples:
        model = replace(model, make_vocab_size_divisible_by=multiple)
        if model.padded_vocab_size(num_entries) == rows:
            return model
    padded_rows = model.padded_vocab_size(num_entries)
    if padded_rows < rows:
        raise InputError(
            f"{path}: the tokenizer's {num_entries} entries in a multiple of {vocab_multiple} are "
            f"{padded_rows} rows, but the model has {rows}: give a larger multiple, or leave it out"
        )
    return model
