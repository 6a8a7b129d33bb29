"""A run whose model is described by a checkpoint, or starts from one that was pretrained."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_zpp.checkpoint.checkpoint import choose
from megatron_zpp.checkpoint.open_model import OpenedModel, OpenModel
from megatron_zpp.checkpoint.training_state import NOT_ARCHITECTURE, read_state, with_tuples
from megatron_zpp.settings.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    TokenizerConfig,
)
from megatron_zpp.settings.gpt.model import OF_TRAINING
from zeropp import InputError

log = logging.getLogger("megatron_zpp")


def with_initial_model(config: Config, open_model: OpenModel) -> tuple[Config, OpenedModel | None]:
    """Return `config` with the shape of the model that its flags name, and that model if opened.

    `--use-checkpoint-args` takes the shape from `--load`; `--pretrained-checkpoint` opens a model,
    and takes its shape and its tokenizer. The sequence length and what only training
    uses stay as the flags set them; the path of the checkpoint that was opened is recorded.
    Raises InputError for a model that cannot be opened, for sequences longer than its positions,
    and without data to tokenize for it.
    """
    if config.checkpoint.use_checkpoint_args:
        model = checkpoint_model(config.checkpoint, config.model, config.given)
        config = replace(config, model=model)
    folder = config.pretrained_checkpoint
    if folder is None:
        return config, None
    if Path(folder).suffix == ".gguf":
        raise InputError(
            f"--pretrained-checkpoint {folder}: import it first, once for all ranks: "
            f"tools/convert_hf.py --from-hf {folder} --save FOLDER"
        )
    _require_data(config.data, folder)
    has_tokenizer_flags = config.tokenizer != TokenizerConfig()
    opened = open_model(folder, config.tokenizer if has_tokenizer_flags else None)
    seq_length, num_positions = config.model.seq_length, opened.config.num_positions
    if seq_length > num_positions:
        raise InputError(
            f"--seq-length {seq_length} is more than the {num_positions} positions of the model in "
            f"{folder}"
        )
    size = f"{opened.config.num_layers} layers, hidden size {opened.config.hidden_size}"
    log.info("%s: %s, %s", opened.path, size, opened.tokenizer.name)
    of_training = {name: getattr(config.model, name) for name in OF_TRAINING}
    model = replace(opened.config, seq_length=seq_length, **of_training)
    config = config.starting_from(str(opened.path.resolve()))
    return replace(config, model=model, tokenizer=opened.tokenizer_config), opened


def _require_data(data: DataConfig, folder: str) -> None:
    if not data.names_data:
        raise InputError(
            f"--pretrained-checkpoint {folder} needs text for the model's tokenizer: give "
            "--data-path with .jsonl files or the output of tools/preprocess_data.py"
        )


def checkpoint_model(
    options: CheckpointConfig, model: ModelConfig, typed: Mapping[str, str]
) -> ModelConfig:
    """Return `model` with the architecture of the newest checkpoint in `--load`.

    typed: the flags that were given, with their values, by setting. All ranks call it. Raises
    InputError if there is no checkpoint.
    """
    path = choose(
        options.load, verify=not options.no_verify_checkpoint, iteration=options.ckpt_step
    )
    if path is None:
        raise no_checkpoint_error(options.load, "--use-checkpoint-args")
    defaults = vars(ModelConfig())
    settings = {name: defaults[name] for name in defaults if name not in NOT_ARCHITECTURE}
    settings |= with_tuples(read_state(path).architecture)
    settings.pop("vocab_size")
    num_positions = settings.pop("num_positions", None)
    if num_positions is not None:
        settings["max_position_embeddings"] = num_positions
    for name, value in settings.items():
        own = getattr(model, name)
        if value != own:
            given = typed.get(name) or (own != defaults[name] and f"{name} = {own}")
            but = f", and {given} has no effect" if given else ""
            log.info("--use-checkpoint-args: %s is %s%s", name, value, but)
    model = replace(model, **settings)
    model.check()
    return model


def no_checkpoint_error(folder: str, flag: str) -> InputError:
    """The error for a `flag` that needs a checkpoint where `--load` has none."""
    return InputError(
        f"--load {folder} holds no checkpoint, and {flag} needs one: name the folder that --save "
        f"named, or leave {flag} out"
    )
