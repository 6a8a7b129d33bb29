"""What a run reads before anything is built: model descriptions, tokenizer and datasets."""

import logging
from dataclasses import dataclass, replace

from megatron_zpp.data.gpt_dataset import build_datasets
from megatron_zpp.data.instructions.instruction_dataset import build_instructions
from megatron_zpp.data.text_source import resolve_data
from megatron_zpp.models.open_model import OpenedModel
from megatron_zpp.models.pretrained import with_named_model
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.data import names_examples
from megatron_zpp.settings.schedule import Schedules
from megatron_zpp.text.generate import Request, check
from megatron_zpp.tokenizer import Tokenizer
from zeropp import InputError

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The configuration of a run, complete, and what it was completed from.

    `config` has the shape of the model that the flags name and the paths of the data that is read.
    `datasets` are training, validation and test, None where there is none. `pretrained` is the
    model to start from, if the flags name one.
    """

    config: Config
    tokenizer: Tokenizer
    datasets: tuple
    pretrained: OpenedModel | None


def open_inputs(requested: Config, ranks: Ranks) -> Inputs:
    """Open what the configuration from `parse` names; all ranks call it.

    Raises InputError for what cannot be opened or does not fit together.
    """
    with_model, pretrained = with_named_model(requested)
    data, tokenizer = ranks.rank_zero_first(
        lambda: resolve_data(with_model.data, with_model.tokenizer)
    )
    config = replace(with_model, data=data)
    if config.evaluation.sample_prompt is not None:
        prompt = tuple(tokenizer.encode(config.evaluation.sample_prompt))
        # Fails now rather than after training.
        check(Request(prompt=prompt), config.model.num_positions, tokenizer.vocab_size)
    datasets = ranks.rank_zero_first(lambda: open_datasets(config, tokenizer))
    require_data(config, datasets)
    return Inputs(config=config, tokenizer=tokenizer, datasets=datasets, pretrained=pretrained)


def open_datasets(config: Config, tokenizer: Tokenizer) -> tuple:
    """Training, validation and test datasets, as long as Megatron makes them."""
    length, evaluation = Schedules.of(config).length, config.evaluation
    batch = config.batch.global_batch_size
    rounds = length.iterations // evaluation.eval_interval + 1 + evaluation.eval_at_start
    sizes = (
        length.samples,
        rounds * evaluation.eval_iters * batch,
        evaluation.eval_iters * batch,
    )
    if names_examples(config.data):
        return build_instructions(
            config.data, config.model.seq_length, sizes, config.training.seed, tokenizer
        )
    return build_datasets(
        config.data, config.model.seq_length, sizes, config.training.seed, tokenizer.vocab_size
    )


def require_data(config: Config, datasets: tuple) -> None:
    """Raise InputError without training data; log that nothing is held out."""
    data = config.data
    if datasets[0] is None and not config.training.skip_train:
        raise InputError(
            f"there is no training data: --split {data.split!r} gives it no weight"
            if data.data_path
            else "there is no training data: give --train-data-path too"
        )
    if datasets[1] is None and config.evaluation.eval_iters:
        log.info("no text is held out (see --split): there will be no validation loss")
