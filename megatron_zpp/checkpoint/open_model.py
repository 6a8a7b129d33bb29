"""Open a model: a checkpoint of ours here, and models of other programs where commands say how.

LoRA adapters in a checkpoint are opened as their base model with the adapters merged.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights, find_checkpoint
from megatron_zpp.checkpoint.iteration_folders import candidates
from megatron_zpp.checkpoint.merged_weights import CheckpointAdapters, MergedWeights
from megatron_zpp.checkpoint.training_state import (
    STATE,
    TrainingState,
    architecture,
    read_state,
    with_tuples,
)
from megatron_zpp.checkpoint.weight_source import (
    WeightSource,
    fill_parameters,
    parameter_shapes,
)
from megatron_zpp.data.text_source import resolve_tokenizer
from megatron_zpp.model.lora import is_adapter
from megatron_zpp.settings.config import LoraConfig, ModelConfig, TokenizerConfig
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer, tokenizer_config_of
from zeropp.errors import InputError

ORIGIN_FOLDER = "hugging_face"  # beside checkpoints: the files of the model they were imported from
HF_CONFIG = "config.json"
PADDING_FIELD = "make_vocab_size_divisible_by"  # the only field that adapters do not depend on


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model's configuration, and where its weights are; none of them has been read yet.

    `path` is what was opened; of a folder of checkpoints, the folder of one iteration. `origin` is
    the folder of the Hugging Face config.json, if the model comes with one. `adapters` are those of
    a LoRA checkpoint, which `weights` has merged, and `base` is the path of their base model.
    `files` holds what a .gguf file contains besides tensors, and is deleted with the last reference
    to it.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    tokenizer_config: TokenizerConfig
    weights: WeightSource
    origin: Path | None = None
    adapters: CheckpointAdapters | None = None
    base: Path | None = None
    files: tempfile.TemporaryDirectory | None = None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary in the weights."""
        return self.config.padded_vocab_size(self.tokenizer.vocab_size)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter by name, whole, on the CPU, in the dtype of the file."""
        for name in self.weights.facts():
            yield name, self.weights.read(name)

    def fill(self, model: nn.Module) -> None:
        """Copy the weights into a GPT; see `weight_source.fill_parameters`."""
        fill_parameters(model, self.weights)


class OpenModel(Protocol):
    """Opens the model in a folder or a file; all ranks call it.

    `tokenizer_config` replaces the tokenizer that the model comes with. Raises InputError.
    """

    def __call__(
        self, folder: Path | str, tokenizer_config: TokenizerConfig | None = None
    ) -> OpenedModel:
        """Return the model, with none of its weights read."""


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of ours or has some in it."""
    is_iteration = path.name.startswith("iter_") and (path / STATE).is_file()
    return is_iteration or bool(candidates(path)[0])


def open_checkpoint(
    folder: Path | str,
    tokenizer_config: TokenizerConfig | None = None,
    base: Path | str | None = None,
    open_base: OpenModel | None = None,
) -> OpenedModel:
    """Open a folder of checkpoints or one of them, an `OpenModel` for those alone.

    `base` replaces the recorded base model of adapters, which `open_base` opens, by default as a
    checkpoint too. Raises InputError for anything else, for damaged files, and for parts that do
    not fit together.
    """
    if not is_checkpoint(path := Path(folder)):
        raise InputError(
            f"{path}: expected a folder of checkpoints (iter_0000100 in it); models of other "
            "programs are read by megatron_zpp.interchange, which is not installed"
        )
    path = find_checkpoint(path, "the model")
    state = read_state(path)
    settings = state.configuration
    if not {"model", "tokenizer", "data"} <= settings.keys():
        raise InputError(
            f"{path}: does not describe its model: it was saved by another program, and only "
            "checkpoints of megatron_zpp can be opened"
        )
    weights = CheckpointWeights(path, keep=lambda name: not is_adapter(name))
    lora = _section(LoraConfig, settings.get("lora", {}), path)
    opened_base, base_path, adapters = None, None, None
    if lora.lora_rank:
        adapters = _adapters_of(path, state, lora)
        base_path = Path(lora.pretrained_checkpoint)
        if base is not None or not _has_all_weights(path, state, weights):
            folder = base_path if base is None else Path(base)
            opened_base = _open_base(
                path, state, folder, tokenizer_config, open_base or open_checkpoint
            )
            base_path, weights = opened_base.path, opened_base.weights
            tokenizer_config = tokenizer_config or opened_base.tokenizer_config
        weights = MergedWeights(weights, adapters)
    elif base is not None:
        raise InputError(f"{path}: was trained without --lora-rank: leave --base out")
    tokenizer_config = tokenizer_config or _saved_tokenizer_config(path, state)
    return OpenedModel(
        path=path,
        config=_section(ModelConfig, settings["model"], path),
        tokenizer=_build_saved_tokenizer(path, state, tokenizer_config),
        tokenizer_config=tokenizer_config,
        weights=weights,
        origin=_origin(path, base_path),
        adapters=adapters,
        base=base_path,
        files=opened_base.files if opened_base else None,
    )


def _origin(path: Path, base: Path | None) -> Path | None:
    """Return the folder of the config.json of a checkpoint, or of the base of its adapters."""
    folders = [path.parent / ORIGIN_FOLDER]
    if base is not None:
        folders += [base, base.parent / ORIGIN_FOLDER]
    return next((folder for folder in folders if (folder / HF_CONFIG).is_file()), None)


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
    path: Path,
    state: TrainingState,
    folder: Path,
    tokenizer_config: TokenizerConfig | None,
    open_base: OpenModel,
) -> OpenedModel:
    """Open the base model of a checkpoint's adapters.

    Raises InputError if it cannot be opened or has another architecture.
    """
    if folder.resolve() in (path.resolve(), path.parent.resolve()):
        raise InputError(
            f"{path} cannot be its own base: name the model that training started from, --base"
        )
    try:
        base = open_base(folder, tokenizer_config)
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
