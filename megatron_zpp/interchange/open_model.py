"""Open a model in any format: our checkpoints, a Hugging Face folder, a PEFT folder, a .gguf file.

LoRA adapters, in a checkpoint or a PEFT folder, are opened as their base model with the adapters
merged.
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
from megatron_zpp.checkpoint.iteration_folders import candidates, require_own
from megatron_zpp.checkpoint.training_state import (
    STATE,
    TrainingState,
    architecture,
    read_state,
    with_tuples,
)
from megatron_zpp.checkpoint.weight_source import WeightSource, fill_parameters
from megatron_zpp.data.text_source import resolve_tokenizer
from megatron_zpp.interchange import gguf
from megatron_zpp.interchange.adapters import peft_config
from megatron_zpp.interchange.adapters.merged_weights import CheckpointAdapters, MergedWeights
from megatron_zpp.interchange.adapters.peft_adapters import PeftAdapters, is_peft
from megatron_zpp.interchange.converted_weights import (
    ConvertedWeights,
    TensorFiles,
    parameter_shapes,
)
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.hf_config import Family, HuggingFaceConfig, family_of, parse_config
from megatron_zpp.interchange.hf_folder import CONFIG, is_hugging_face, read_config
from megatron_zpp.interchange.mxfp4 import tensors_of
from megatron_zpp.interchange.tokenizer_files import tokenizer_config_of
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.lora import is_adapter
from megatron_zpp.settings.config import LoraConfig, ModelConfig, TokenizerConfig
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from zeropp.errors import InputError

ORIGIN_FOLDER = "hugging_face"  # beside checkpoints: the files of the model they were imported from
PADDING_FIELD = "make_vocab_size_divisible_by"  # the only field that adapters do not depend on
VOCAB_MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)  # tried in this order; the default first

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model's configuration, and where its weights are; none of them has been read yet.

    `path` is what was opened; of a folder of checkpoints, the folder of one iteration. `hf_config`
    is the config.json, if the model comes with one. `adapters` are those of a LoRA checkpoint,
    which `weights` has merged, and `base` is the path of their base model. `files` holds the
    tokenizer of a .gguf file, and is deleted with the last reference to it.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    tokenizer_config: TokenizerConfig
    weights: WeightSource
    hf_config: HuggingFaceConfig | None = None
    adapters: CheckpointAdapters | None = None
    base: Path | None = None
    files: tempfile.TemporaryDirectory | None = None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary in the weights."""
        return self.config.padded_vocab_size(self.tokenizer.vocab_size)

    def family(self) -> Family:
        """Return the Hugging Face family that the model is of, or can be exported as.

        Raises InputError if there is none.
        """
        return self.hf_config.family if self.hf_config else family_of(self.config)

    def adapter_sizes(self) -> Sizes:
        """Return the sizes for converting adapters, which never have rows of the vocabulary."""
        rows = self.padded_vocab_size
        return Sizes(model=self.config, vocab_rows=rows, padded_rows=rows)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter by name, whole, on the CPU, in the dtype of the file."""
        for name in self.weights.facts():
            yield name, self.weights.read(name)

    def fill(self, model: nn.Module) -> None:
        """Copy the weights into a GPT; see `weight_source.fill_parameters`."""
        fill_parameters(model, self.weights)


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
        content = read_config(path)
        return _open_hugging_face(
            path,
            content,
            tensors_of(path, content),
            tokenizer_config or tokenizer_config_of(path),
            vocab_multiple,
        )
    is_iteration = path.name.startswith("iter_") and (path / STATE).is_file()
    if is_iteration or candidates(path)[0]:
        return _open_checkpoint(find_checkpoint(path, "the model"), tokenizer_config, base)
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


def _open_checkpoint(
    path: Path, tokenizer_config: TokenizerConfig | None, base_folder: Path | str | None
) -> OpenedModel:
    state = read_state(path)
    settings = state.configuration
    if not {"model", "tokenizer", "data"} <= settings.keys():
        raise InputError(
            f"{path}: does not describe its model: it was saved by another program, and only "
            "checkpoints of megatron_zpp can be opened"
        )
    weights = CheckpointWeights(path, keep=lambda name: not is_adapter(name))
    lora = _section(LoraConfig, settings.get("lora", {}), path)
    base, base_path, adapters = None, None, None
    if lora.lora_rank:
        adapters = _adapters_of(path, state, lora)
        base_path = Path(lora.pretrained_checkpoint)
        if base_folder is not None or not _has_all_weights(path, state, weights):
            folder = base_path if base_folder is None else Path(base_folder)
            base = _open_base(path, state, folder, tokenizer_config)
            base_path, weights = base.path, base.weights
            tokenizer_config = tokenizer_config or base.tokenizer_config
        weights = MergedWeights(weights, adapters)
    elif base_folder is not None:
        raise InputError(f"{path}: was trained without --lora-rank: leave --base out")
    tokenizer_config = tokenizer_config or _saved_tokenizer_config(path, state)
    return OpenedModel(
        path=path,
        config=_section(ModelConfig, settings["model"], path),
        tokenizer=_build_saved_tokenizer(path, state, tokenizer_config),
        tokenizer_config=tokenizer_config,
        weights=weights,
        hf_config=_origin_config(path, base_path),
        adapters=adapters,
        base=base_path,
        files=base.files if base else None,
    )


def _origin_config(path: Path, base: Path | None) -> HuggingFaceConfig | None:
    """Return the config.json that a checkpoint, or the base model of its adapters, came with."""
    folders = [path.parent / ORIGIN_FOLDER]
    if base is not None:
        folders += [base, base.parent / ORIGIN_FOLDER]
    for folder in folders:
        if is_hugging_face(folder):
            return parse_config(read_config(folder), str(folder / CONFIG))
    return None


def _saved_tokenizer_config(path: Path, state: TrainingState) -> TokenizerConfig:
    origin = path.parent / ORIGIN_FOLDER
    config = tokenizer_config_of(origin) if origin.is_dir() else None
    if config is not None:
        return config
    saved_config = _section(TokenizerConfig, state.configuration["tokenizer"], path)
    return resolve_tokenizer(state.configuration["data"].get("data_cache_path"), saved_config)


def _build_saved_tokenizer(path: Path, state: TrainingState, config: TokenizerConfig) -> Tokenizer:
    """Build a tokenizer; raises InputError if it is not the one the checkpoint was trained with."""
    tokenizer = build_tokenizer(config)
    if tokenizer.fingerprint != state.tokenizer:
        raise InputError(
            f"the checkpoint {path} was trained with another tokenizer (fingerprint "
            f"{state.tokenizer[:12]}) than {tokenizer.name} of "
            f"{config.tokenizer_model or 'its flags'} ({tokenizer.fingerprint[:12]}): give the one "
            "it was trained with"
        )
    return tokenizer


def _adapters_of(path: Path, state: TrainingState, lora: LoraConfig) -> CheckpointAdapters:
    model = _section(ModelConfig, state.configuration["model"], path)
    parameters = parameter_shapes(
        model, model.padded_vocab_size(state.architecture["vocab_size"]), lora
    )
    expected = {name: each for name, each in parameters.items() if is_adapter(name)}
    return CheckpointAdapters(CheckpointWeights(path, keep=is_adapter), lora, str(path), expected)


def _has_all_weights(path: Path, state: TrainingState, weights: WeightSource) -> bool:
    """Whether a LoRA checkpoint holds its base model too; with MixZ++ it does not."""
    model = _section(ModelConfig, state.configuration["model"], path)
    padded_rows = model.padded_vocab_size(state.architecture["vocab_size"])
    return parameter_shapes(model, padded_rows).keys() <= weights.facts().keys()


def _open_base(
    path: Path, state: TrainingState, folder: Path, tokenizer_config: TokenizerConfig | None
) -> OpenedModel:
    """Open the base model of a checkpoint's adapters.

    Raises InputError if it cannot be opened or has another architecture.
    """
    if folder.resolve() in (path.resolve(), path.parent.resolve()):
        raise InputError(
            f"{path} cannot be its own base: name the model that training started from, --base"
        )
    try:
        base = open_model(folder, tokenizer_config)
    except InputError as error:
        raise InputError(
            f"{path} has adapters of the model {folder}, which cannot be opened: name the folder "
            f"it is in now (--base FOLDER)\n  {error}"
        ) from error
    # The saved architecture was read from JSON, where tuples become lists.
    base_architecture = json.loads(json.dumps(architecture(base.config, base.tokenizer.vocab_size)))
    lines = [
        f"{name} is {base_architecture.get(name)}, expected {value}"
        for name, value in state.architecture.items()
        if name != PADDING_FIELD and base_architecture.get(name) != value
    ]
    if lines:
        raise InputError(
            f"{folder} is not the model that the adapters in {path} belong to:\n  "
            + "\n  ".join(lines)
        )
    return base


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
    adapters = PeftAdapters(path, base.family().names, base.adapter_sizes())
    return replace(base, path=path, weights=MergedWeights(base.weights, adapters), base=base.path)


def _open_gguf(
    path: Path, tokenizer_config: TokenizerConfig | None, vocab_multiple: int | None
) -> OpenedModel:
    model, files = gguf.GgufModel(path), None
    if tokenizer_config is None:
        files = tempfile.TemporaryDirectory()
        model.save_tokenizer(Path(files.name))
        tokenizer_config = tokenizer_config_of(Path(files.name))
    opened = _open_hugging_face(path, model.config, model, tokenizer_config, vocab_multiple)
    return replace(opened, files=files)


def _open_hugging_face(
    path: Path,
    content: dict[str, Any],
    tensors: TensorFiles,
    tokenizer_config: TokenizerConfig | None,
    vocab_multiple: int | None,
) -> OpenedModel:
    """Open a model by the content of its config.json and its tensors."""
    hf_config = parse_config(content, str(path / CONFIG) if path.is_dir() else str(path))
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
        hf_config=hf_config,
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


def _section(kind: type, values: dict[str, Any], path: Path) -> Any:
    """Build a section of the configuration from the values in a checkpoint.

    Checkpoints of earlier versions also have flags that change nothing.
    """
    idle = {flag.name.replace("-", "_") for flag in flags_without_effect()}
    values = {name: value for name, value in values.items() if name not in idle}
    names = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(values.keys() - names)
    if unknown:
        raise InputError(f"{path} has unknown settings: {', '.join(unknown)}")
    return kind(**with_tuples(values))
