"""A model in any of the forms it may lie in: our checkpoints, a Hugging Face folder, a .gguf.

What LoRA has tuned, a checkpoint or PEFT's folder, opens as the base with the adapters merged.
"""

import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights, find_checkpoint
from megatron_zpp.checkpoint.iteration_folders import candidates
from megatron_zpp.checkpoint.training_state import (
    STATE,
    TrainingState,
    architecture,
    read_state,
)
from megatron_zpp.checkpoint.weight_source import WeightSource, fill_parameters
from megatron_zpp.data.text_source import resolve_tokenizer
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.lora import is_adapter
from megatron_zpp.models import gguf
from megatron_zpp.models import peft_adapters as peft
from megatron_zpp.models.hf_config import Described, family_of, read_settings
from megatron_zpp.models.hf_folder import CONFIG, FolderTensors, is_hugging_face, read_config
from megatron_zpp.models.hf_weights import ForeignWeights, Tensors, shapes
from megatron_zpp.models.lora_adapters import Adapters, MergedWeights
from megatron_zpp.models.tensor_forms import Sizes
from megatron_zpp.models.tokenizer_files import tokenizer_in
from megatron_zpp.models.weight_names import TABLES
from megatron_zpp.settings.config import LoraConfig, ModelConfig, TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from zeropp.errors import InputError

BESIDE = "hugging_face"  # in a folder of checkpoints: the files of the model they were made of
PADDING = ("make_vocab_size_divisible_by",)  # of the architecture, of no meaning for adapters
MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # of the rows of a vocabulary, the default first

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """What a model is, and where its weights are; none of them has been read yet.

    `path` is what was opened in the end, for checkpoints that of one iteration. `described` is what
    the config.json says, if the model comes with one. `adapters` are those of a checkpoint that
    LoRA made; they are merged into `weights`, those of the model `base`. `files` is the folder of
    the tokenizer that a .gguf brought, and goes with the last who holds it.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    tokenizer_config: TokenizerConfig
    weights: WeightSource
    described: Described | None = None
    adapters: Adapters | None = None
    base: Path | None = None
    files: tempfile.TemporaryDirectory | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, whole, on the CPU, in the dtype of the file; one at a time."""
        for name in self.weights.facts():
            yield name, self.weights.read(name)

    def fill(self, model: nn.Module) -> None:
        """Copy the weights into a GPT; see `weight_source.fill_parameters`."""
        fill_parameters(model, self.weights)


def open_model(
    folder: Path | str,
    tokenizer: TokenizerConfig | None = None,
    multiple: int | None = None,
    base: Path | str | None = None,
) -> OpenedModel:
    """Open checkpoints (or one of them), a Hugging Face or PEFT folder, or a .gguf file.

    `tokenizer` replaces the one that the model comes with. The vocabulary of a foreign model is
    padded to a `multiple`, or not at all. `base` replaces the model that adapters say they belong
    to. All ranks call it. Raises InputError for what is none of these, damaged, unknown, or does
    not fit together.
    """
    path = Path(folder)
    if peft.is_adapters(path):
        return _open_peft(path, tokenizer, multiple, base)
    is_foreign = path.suffix == gguf.SUFFIX or is_hugging_face(path)
    if is_foreign and base is not None:
        raise InputError(f"{path}: is a whole model without adapters: leave --base out")
    if path.suffix == gguf.SUFFIX:
        return _open_gguf(path, tokenizer, multiple)
    if is_hugging_face(path):
        content, tensors = read_config(path), FolderTensors(path)
        return _foreign(path, content, tensors, tokenizer or tokenizer_in(path), multiple)
    is_one = path.name.startswith("iter_") and (path / STATE).is_file()
    if is_one or candidates(path)[0]:
        return _open_checkpoint(find_checkpoint(path, "the model"), tokenizer, base)
    raise InputError(
        f"{path}: expected a folder of checkpoints (iter_0000100 in it), a Hugging Face folder "
        f"({CONFIG} in it), PEFT's ({peft.CONFIG} in it) or a .gguf file"
    )


def load_model(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tokenizer: TokenizerConfig | None = None,
    base: Path | str | None = None,
) -> tuple[GPT, Tokenizer]:
    """The whole GPT on one device, in eval mode, and its tokenizer; `open_model` has the rest."""
    opened = open_model(folder, tokenizer, base=base)
    with torch.device("meta"):
        model = GPT(opened.config, opened.tokenizer.vocab_size)
    model = model.to(dtype).to_empty(device=device)
    opened.fill(model)
    return model.eval(), opened.tokenizer


def _open_checkpoint(
    path: Path, tokenizer: TokenizerConfig | None, given: Path | str | None
) -> OpenedModel:
    state = read_state(path)
    settings = state.configuration
    if not {"model", "tokenizer", "data"} <= settings.keys():
        raise InputError(f"{path}: says too little of its model: it was saved by another program")
    weights = CheckpointWeights(path, keep=lambda name: not is_adapter(name))
    lora = _section(LoraConfig, settings.get("lora", {}), path)
    base, adapters = None, None
    if lora.lora_rank:
        adapters = Adapters(CheckpointWeights(path, keep=is_adapter), lora, str(path))
        base = _base_of(path, state, weights, lora.pretrained_checkpoint, given, tokenizer)
        if base is not None:
            weights, tokenizer = base.weights, tokenizer or base.tokenizer_config
        weights = MergedWeights(weights, adapters)
    elif given is not None:
        raise InputError(f"{path}: was trained without --lora-rank: leave --base out")
    beside = path.parent / BESIDE
    chosen = tokenizer or (tokenizer_in(beside) if beside.is_dir() else None)
    if chosen is None:
        saved = _section(TokenizerConfig, settings["tokenizer"], path)
        chosen = resolve_tokenizer(settings["data"].get("data_cache_path"), saved)
    built = build_tokenizer(chosen)
    if built.fingerprint != state.tokenizer:
        raise InputError(
            f"the checkpoint {path} was trained with another tokenizer (fingerprint "
            f"{state.tokenizer[:12]}) than {built.name} of {chosen.tokenizer_model or 'its flags'} "
            f"({built.fingerprint[:12]}): give the one it was trained with"
        )
    described = None
    if is_hugging_face(beside):
        described = read_settings(read_config(beside), str(beside / CONFIG))
    return OpenedModel(
        path=path,
        config=_section(ModelConfig, settings["model"], path),
        tokenizer=built,
        tokenizer_config=chosen,
        weights=weights,
        described=described,
        adapters=adapters,
        base=base.path if base else Path(lora.pretrained_checkpoint) if adapters else None,
        files=base.files if base else None,
    )


def _base_of(
    path: Path,
    state: TrainingState,
    weights: WeightSource,
    said: str,
    given: Path | str | None,
    tokenizer: TokenizerConfig | None,
) -> OpenedModel | None:
    """The model under a checkpoint's adapters; None if the checkpoint has it and no other is given.

    Raises InputError for one that cannot be opened, and for one of another architecture.
    """
    saved = {name: value for name, value in state.architecture.items() if name not in PADDING}
    model = _section(ModelConfig, state.configuration["model"], path)
    rows = model.padded_vocab_size(state.architecture["vocab_size"])
    if given is None and shapes(model, rows).keys() <= weights.facts().keys():
        return None
    folder = Path(said if given is None else given)
    if folder.resolve() in (path.resolve(), path.parent.resolve()):
        raise InputError(f"{path} cannot be its own base: name the model it began with, --base")
    try:
        base = open_model(folder, tokenizer)
    except InputError as error:
        raise InputError(
            f"{path} has adapters of the model {folder}, which cannot be opened: name the folder "
            f"it is in now (--base FOLDER)\n  {error}"
        ) from error
    there = architecture(base.config, base.tokenizer.vocab_size)
    lines = [
        f"{name} is {there.get(name)}, expected {value}"
        for name, value in saved.items()
        if json.loads(json.dumps(there.get(name))) != value
    ]
    if lines:
        raise InputError(
            f"{folder} is not the model that the adapters in {path} belong to:\n  "
            + "\n  ".join(lines)
        )
    return base


def _open_peft(
    path: Path,
    tokenizer: TokenizerConfig | None,
    multiple: int | None,
    given: Path | str | None,
) -> OpenedModel:
    said = peft.read_adapter_config(path).get(peft.BASE)
    folder = Path(given or said or "")
    if not folder.exists() or folder.resolve() == path.resolve() or not (given or said):
        raise InputError(
            f"{path}: its base model {said!r} is no folder here: name the one it is in "
            "(--base FOLDER)"
            if given is None
            else f"--base {given}: there is no model"
        )
    try:
        base = open_model(folder, tokenizer, multiple)
    except RecursionError:
        raise InputError(f"{path}: its base model {said!r} leads back to it") from None
    family = base.described.family if base.described else family_of(base.config)
    padded = base.config.padded_vocab_size(base.tokenizer.vocab_size)
    sizes = Sizes(model=base.config, vocab_rows=padded, padded_rows=padded)
    changes = peft.PeftChanges(path, TABLES[family.name], sizes)
    return replace(base, path=path, weights=MergedWeights(base.weights, changes), base=base.path)


def _open_gguf(path: Path, tokenizer: TokenizerConfig | None, multiple: int | None) -> OpenedModel:
    model, files = gguf.GgufModel(path), None
    if tokenizer is None:
        files = tempfile.TemporaryDirectory()
        model.save_tokenizer(Path(files.name))
        tokenizer = tokenizer_in(Path(files.name))
    return replace(_foreign(path, model.config, model, tokenizer, multiple), files=files)


def _foreign(
    path: Path,
    content: dict[str, Any],
    tensors: Tensors,
    chosen: TokenizerConfig | None,
    multiple: int | None,
) -> OpenedModel:
    described = read_settings(content, str(path / CONFIG) if path.is_dir() else str(path))
    if chosen is None:
        log.info("%s brings no tokenizer: token ids are numbers (NullTokenizer)", path)
        chosen = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=described.vocab_rows)
    tokenizer = build_tokenizer(chosen)
    model = _fit_vocabulary(described, tokenizer.vocab_size, multiple, path)
    table = TABLES[described.family.name]
    padded = model.padded_vocab_size(tokenizer.vocab_size)
    return OpenedModel(
        path=path,
        config=model,
        tokenizer=tokenizer,
        tokenizer_config=chosen,
        weights=ForeignWeights(tensors, table, model, described.vocab_rows, padded),
        described=described,
    )


def _fit_vocabulary(
    described: Described, entries: int, multiple: int | None, path: Path
) -> ModelConfig:
    """The model with a padding that makes of the tokenizer's `entries` the rows there are.

    So the softmax is over the same rows as theirs; a `multiple` that is given adds rows of zeros.
    """
    rows = described.vocab_rows
    if entries > rows:
        raise InputError(
            f"{path}: the tokenizer has {entries} entries, but the model only {rows} rows for them"
        )
    padded = [
        replace(described.model, make_vocab_size_divisible_by=number)
        for number in ((*MULTIPLES, rows) if multiple is None else (multiple,))
    ]
    sizes = [model.padded_vocab_size(entries) for model in padded]
    if multiple is None:
        return padded[sizes.index(rows)]
    if sizes[0] < rows:
        raise InputError(
            f"{path}: the tokenizer's {entries} entries in a multiple of {multiple} are {sizes[0]} "
            f"rows, but the model has {rows}: give a larger multiple, or leave it out"
        )
    return padded[0]


def _section(kind: type, values: dict[str, Any], path: Path) -> Any:
    known = {item.name for item in dataclasses.fields(kind)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise InputError(f"{path} has unknown settings: {', '.join(unknown)}")
    return kind(**values)
