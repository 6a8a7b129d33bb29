"""Opens checkpoints of adapters: as the model beside which they were trained, with them merged."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_zpp.capabilities.lora.adapters import add_adapters
from megatron_zpp.capabilities.lora.merged_weights import CheckpointAdapters, MergedWeights
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights
from megatron_zpp.checkpoint.open_model import OpenedModel, SavedModel, section_of
from megatron_zpp.checkpoint.training_state import architecture
from megatron_zpp.checkpoint.weight_source import parameter_shapes
from megatron_zpp.model.delta import is_of_delta
from zeropp.errors import InputError

PADDING_FIELD = "make_vocab_size_divisible_by"  # the only field that adapters do not depend on


def completed(
    saved: SavedModel, base: Path | str | None, open_base: Callable[[Path], OpenedModel]
) -> SavedModel:
    """Return the saved model with its adapters merged, if it has some.

    `base` replaces the recorded path of the base model, which `open_base` opens. Raises InputError
    for a base that does not fit, or that is not needed.
    """
    config = section_of(LoraConfig, saved.state.configuration.get("lora", {}), saved.path)
    if not config.lora_rank:
        if base is not None:
            raise InputError(f"{saved.path}: was trained without --lora-rank: leave --base out")
        return saved
    adapters, recorded = _adapters_of(saved, config), Path(config.pretrained_checkpoint)
    if base is None and _has_all_weights(saved):
        opened, path, weights = None, recorded, saved.weights
    else:
        opened = _open_base(saved, Path(base or recorded), open_base)
        path, weights = opened.path, opened.weights
    merged = MergedWeights(weights, adapters)
    return replace(saved, weights=merged, added=adapters, base=path, opened_base=opened)


def _adapters_of(saved: SavedModel, config: LoraConfig) -> CheckpointAdapters:
    extend = partial(add_adapters, config=config)
    parameters = parameter_shapes(saved.config, saved.padded_vocab_size, extend)
    expected = {name: each for name, each in parameters.items() if is_of_delta(name)}
    weights = CheckpointWeights(saved.path, keep=is_of_delta)
    return CheckpointAdapters(weights, config, str(saved.path), expected)


def _has_all_weights(saved: SavedModel) -> bool:
    """Whether a checkpoint holds the base model too; with MixZ++ it does not."""
    names = parameter_shapes(saved.config, saved.padded_vocab_size).keys()
    return names <= saved.weights.facts().keys()


def _open_base(
    saved: SavedModel, folder: Path, open_base: Callable[[Path], OpenedModel]
) -> OpenedModel:
    """Open the base model of a checkpoint's adapters.

    Raises InputError if it cannot be opened or has another architecture.
    """
    path = saved.path
    if folder.resolve() in (path.resolve(), path.parent.resolve()):
        raise InputError(
            f"{path} cannot be its own base: name the model that training started from, --base"
        )
    try:
        base = open_base(folder)
    except InputError as error:
        raise InputError(
            f"{path} has adapters of the model {folder}, which cannot be opened: name the folder "
            f"it is in now (--base FOLDER)\n  {error}"
        ) from error
    # The saved architecture was read from JSON, where tuples become lists.
    base_architecture = json.loads(json.dumps(architecture(base.config, base.tokenizer.vocab_size)))
    lines = [
        f"{name} is {base_architecture.get(name)}, expected {value}"
        for name, value in saved.state.architecture.items()
        if name != PADDING_FIELD and base_architecture.get(name) != value
    ]
    if lines:
        raise InputError(
            f"{folder} is not the model that the adapters in {path} belong to:\n  "
            + "\n  ".join(lines)
        )
    return base
