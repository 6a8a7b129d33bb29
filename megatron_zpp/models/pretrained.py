"""A run that begins with a model trained before: its shape, its tokenizer, its weights."""

import logging
from dataclasses import replace
from pathlib import Path

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_model
from megatron_zpp.models.gguf import SUFFIX
from megatron_zpp.models.open_model import OpenedModel, open_model
from megatron_zpp.settings.config import Config, DataConfig, TokenizerConfig
from zeropp import InputError, Sharding

log = logging.getLogger("megatron_zpp")


def with_named_model(config: Config) -> tuple[Config, OpenedModel | None]:
    """`config` with the shape of the model that its flags name, and the model to start from.

    `--use-checkpoint-args` names the model in `--load`, `--pretrained-checkpoint` any other.
    """
    if config.checkpoint.use_checkpoint_args:
        config = with_checkpoint_model(config)
    return with_pretrained_model(config)


def with_pretrained_model(config: Config) -> tuple[Config, OpenedModel | None]:
    """`config` with the shape and the tokenizer of `--pretrained-checkpoint`, and that model.

    Sequences stay as long as the flags say; which checkpoint was opened is kept. Raises InputError
    for what cannot be opened, for sequences longer than the model's positions, where there is no
    text for its tokenizer, and for a run that would save beside its base, newer than that.
    """
    folder = config.lora.pretrained_checkpoint
    if folder is None:
        return config, None
    save = config.checkpoint.save
    if save is not None and Path(save).resolve() == Path(folder).resolve():
        raise InputError(
            f"--save {save} is the folder of --pretrained-checkpoint, and the newest checkpoint in "
            "it would then be another: save elsewhere"
        )
    if Path(folder).suffix == SUFFIX:
        raise InputError(
            f"--pretrained-checkpoint {folder}: import it first, once for all ranks: "
            f"tools/convert_hf.py --from-hf {folder} --save FOLDER"
        )
    named = None if config.tokenizer == TokenizerConfig() else config.tokenizer
    _require_text(config.data, folder)
    opened = open_model(folder, named)
    length, positions = config.model.seq_length, opened.config.num_positions
    if length > positions:
        raise InputError(
            f"--seq-length {length} is more than the {positions} positions of the model in {folder}"
        )
    log.info(
        "%s: %d layers, hidden size %d, %s", opened.path, opened.config.num_layers,
        opened.config.hidden_size, opened.tokenizer.name,
    )  # fmt: skip
    model = replace(opened.config, seq_length=length)
    lora = replace(config.lora, pretrained_checkpoint=str(opened.path.resolve()))
    config = replace(config, model=model, tokenizer=opened.tokenizer_config, lora=lora)
    return config, opened


def adapters(config: Config, sharding: Sharding) -> list[tuple[str, str]]:
    """What of the model is trained, if not all."""
    lora = config.lora
    if not lora.lora_rank:
        return []
    trained = sum(
        parameter.numel() for parameter in sharding.model.parameters() if parameter.requires_grad
    )
    stored = ""
    if sharding.stores_frozen:
        bits = config.zero.zeropp.nontrainable_weight_bits
        stored = f"\nthe frozen weights are stored and gathered as INT{bits} (MixZ++)"
    what = f"rank {lora.lora_rank}, alpha {lora.lora_alpha:g}: {trained:,} parameters are trained"
    return [("LoRA", what + stored)]


def _require_text(data: DataConfig, folder: str) -> None:
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    if not any(paths) and not data.mock_data:
        raise InputError(
            f"--pretrained-checkpoint {folder} needs text for the model's tokenizer: give "
            "--data-path, examples in .jsonl or what tools/preprocess_data.py makes"
        )
