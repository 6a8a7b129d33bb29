"""A run that starts from a pretrained model: the model's shape, its tokenizer, its weights."""

import logging
from dataclasses import replace
from pathlib import Path

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_model
from megatron_zpp.checkpoint.open_model import OpenedModel, OpenModel
from megatron_zpp.settings.config import Config, DataConfig, TokenizerConfig
from megatron_zpp.settings.gpt.experts import OF_TRAINING
from zeropp import InputError

log = logging.getLogger("megatron_zpp")


def with_initial_model(config: Config, open_model: OpenModel) -> tuple[Config, OpenedModel | None]:
    """Return `config` with the shape of the model that its flags name, and that model if opened.

    `--use-checkpoint-args` takes the shape from `--load`; `--pretrained-checkpoint` opens a model,
    and takes its shape and its tokenizer. The sequence length and how the load of experts is
    balanced stay as the flags set them; the path of the checkpoint that was opened is recorded.
    Raises InputError for a model that cannot be opened, for sequences longer than its positions,
    and without data to tokenize for it.
    """
    if config.checkpoint.use_checkpoint_args:
        config = with_checkpoint_model(config)
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
