"""Open a model: a checkpoint of ours here, and models of other programs where commands say how.

A checkpoint of what was trained beside another model's weights is opened with these.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights, find_checkpoint
from megatron_zpp.checkpoint.iteration_folders import candidates
from megatron_zpp.checkpoint.training_state import STATE, TrainingState, read_state, with_tuples
from megatron_zpp.checkpoint.weight_source import WeightSource, fill_parameters
from megatron_zpp.data.text_source import resolve_tokenizer
from megatron_zpp.model.delta import is_of_delta
from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.config import ModelConfig, TokenizerConfig
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer, tokenizer_config_of
from zeropp.errors import InputError
from zeropp.settings import modules_of

ORIGIN_FOLDER = "hugging_face"  # beside checkpoints: the files of the model they were imported from
HF_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model's configuration, and where its weights are; none of them has been read yet.

    `path` is what was opened; of a folder of checkpoints, the folder of one iteration. `origin` is
    the folder of the Hugging Face config.json, if the model comes with one. `added` is what was
    trained beside the weights of another model, with which `weights` are, and `base` its path.
    `files` holds what a .gguf file contains besides tensors, and is deleted with the last reference
    to it.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    tokenizer_config: TokenizerConfig
    weights: WeightSource
    origin: Path | None = None
    added: Any = None
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


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model in a checkpoint of ours, which capabilities may complete, each by `completed`.

    `weights`, `added` and `base` are those of `OpenedModel`; `opened_base`: the base if it is read.
    """

    path: Path
    state: TrainingState
    weights: WeightSource
    added: Any = None
    base: Path | None = None
    opened_base: OpenedModel | None = None

    @property
    def config(self) -> ModelConfig:
        return section_of(ModelConfig, self.state.configuration["model"], self.path)

    @property
    def padded_vocab_size(self) -> int:
        return self.config.padded_vocab_size(self.state.architecture["vocab_size"])


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

    `base` replaces the recorded model beside which it was trained, which `open_base` opens, by
    default as a checkpoint too. Raises InputError for anything else, for damaged files, and for
    parts that do not fit together.
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
    weights = CheckpointWeights(path, keep=lambda name: not is_of_delta(name))
    saved = SavedModel(path=path, state=state, weights=weights)
    open_base = partial(open_base or open_checkpoint, tokenizer_config=tokenizer_config)
    for module in modules_of("opening", CAPABILITIES):
        saved = module.completed(saved, base, open_base)
    opened_base = saved.opened_base
    if tokenizer_config is None and opened_base is not None:
        tokenizer_config = opened_base.tokenizer_config
    tokenizer_config = tokenizer_config or _saved_tokenizer_config(path, state)
    return OpenedModel(
        path=path,
        config=saved.config,
        tokenizer=_build_saved_tokenizer(path, state, tokenizer_config),
        tokenizer_config=tokenizer_config,
        weights=saved.weights,
        origin=_origin(path, saved.base),
        added=saved.added,
        base=saved.base,
        files=opened_base.files if opened_base else None,
    )


def _origin(path: Path, base: Path | None) -> Path | None:
    """Return the folder of the config.json of a checkpoint, or of its base."""
    folders = [path.parent / ORIGIN_FOLDER]
    if base is not None:
        folders += [base, base.parent / ORIGIN_FOLDER]
    return next((folder for folder in folders if (folder / HF_CONFIG).is_file()), None)


def _saved_tokenizer_config(path: Path, state: TrainingState) -> TokenizerConfig:
    origin = path.parent / ORIGIN_FOLDER
    config = tokenizer_config_of(origin) if origin.is_dir() else None
    if config is not None:
        return config
    saved_config = section_of(TokenizerConfig, state.configuration["tokenizer"], path)
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


def section_of(kind: type, values: dict[str, Any], path: Path) -> Any:
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
