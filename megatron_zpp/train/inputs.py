"""Opens what a run reads: the description of a pretrained model, the tokenizer, the datasets."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_zpp.checkpoint.open_model import OpenedModel, OpenModel
from megatron_zpp.checkpoint.pretrained_model import with_initial_model
from megatron_zpp.data.fill_in_the_middle import filled_in_the_middle
from megatron_zpp.data.gpt_dataset import build_datasets
from megatron_zpp.data.instructions.instruction_dataset import build_instructions
from megatron_zpp.data.loader import Loader
from megatron_zpp.data.split import SPLITS
from megatron_zpp.data.text_source import resolve_data
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config, DataConfig, FimConfig
from megatron_zpp.settings.data import EXAMPLES_SUFFIX, names_examples
from megatron_zpp.text.generate import Request, check
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import require_unicode
from zeropp import InputError
from zeropp.ranks import fail_together, require_same

TRAIN, VALIDATION, TEST = range(3)
DIGITS = 8  # of a hash, to show
SAME_FILES = "give all machines the same data and the same tokenizer"

log = logging.getLogger("megatron_zpp")


@dataclass(kw_only=True)
class Batches:
    """The datasets of a run; each replica takes its own micro-batches from them."""

    open: Callable[[Sequence[Sequence[int]]], tuple]  # in the order of earlier sizes, extended
    datasets: tuple  # training, validation, test; None for a split without data
    earlier_sizes: Sequence[Sequence[int]] = ()
    data: DataConfig
    micro_batch_size: int
    ranks: Ranks
    eod: int

    def go_behind(self, earlier_sizes: Sequence[Sequence[int]]) -> None:
        """Extend the order of runs of earlier sizes, if there are any; all ranks call it."""
        if earlier_sizes:
            self.earlier_sizes = earlier_sizes
            self.datasets = self.ranks.rank_zero_first(lambda: self.open(earlier_sizes))

    def loader(self, split: int, consumed_samples: int, skipped: Sequence[range] = ()) -> Loader:
        """This rank's micro-batches of a split, after the first `consumed_samples` of all ranks.

        Of other splits than TRAIN, replicas that join and leave each have all micro-batches. The
        samples of `skipped`, ranges of whole global batches, are passed over.
        """
        ranks = self.ranks
        alone = split != TRAIN and ranks.replicas.joins_and_leaves
        return Loader(
            self.datasets[split],
            self.data,
            consumed_samples=consumed_samples,
            micro_batch_size=self.micro_batch_size,
            rank=ranks.data_parallel_rank if alone else ranks.part,
            world=ranks.data_parallel_size if alone else ranks.num_parts,
            eod=self.eod,
            device=self.ranks.device,
            skipped=skipped,
        )


def open_inputs(
    requested: Config, ranks: Ranks, open_model: OpenModel
) -> tuple[Config, Tokenizer, Batches, OpenedModel | None]:
    """Return the complete configuration, the tokenizer, the datasets and the pretrained model.

    The configuration is `requested` with the shape of the pretrained model and the paths of the
    data filled in. The model is that of `--pretrained-checkpoint`, if any, opened by
    `open_model`. All ranks call it.

    Raises InputError for a file that cannot be read and for inputs that do not fit together.
    """
    with_model, pretrained = with_initial_model(requested, open_model)
    with_model.require_divisible(ranks.planned_parts)
    data, tokenizer = ranks.rank_zero_first(
        lambda: resolve_data(with_model.data, with_model.tokenizer)
    )
    config = replace(with_model, data=data)
    if (text := config.evaluation.sample_prompt) is not None:
        prompt = tuple(tokenizer.prompt(require_unicode(text, "--sample-prompt")))
        # Fails now rather than after training.
        check(Request(prompt=prompt), config.model.num_positions, tokenizer.vocab_size)
    sizes = config.model.seq_length, config.sample_sizes
    opened = partial(open_datasets, data, config.fim, *sizes, config.training.seed, tokenizer)
    datasets = ranks.rank_zero_first(opened)
    if datasets[TRAIN] is None and not config.training.skip_train:
        raise InputError(
            f"there is no training data: --split {data.split!r} gives it no weight"
            if data.data_path
            else "there is no training data: give --train-data-path too"
        )
    if datasets[VALIDATION] is None and config.evaluation.eval_iters:
        log.info("no text is held out (see --split): there will be no validation loss")
    with fail_together():
        texts = contents(tokenizer, datasets)
    require_same(texts, SAME_FILES)
    batches = Batches(
        open=opened,
        datasets=datasets,
        data=data,
        micro_batch_size=config.batch.micro_batch_size,
        ranks=ranks,
        eod=tokenizer.eod,
    )
    return config, tokenizer, batches, pretrained


def contents(tokenizer: Tokenizer, datasets: tuple) -> dict[str, str]:
    """What the files hold that all ranks read, as texts to compare: three samples of each split."""
    texts = {"the tokenizer": tokenizer.fingerprint[:DIGITS]}
    for split, dataset in zip(SPLITS, datasets, strict=True):
        if not dataset:
            texts[f"{split} data"] = "none"
            continue
        digest = hashlib.sha256()
        for index in (0, len(dataset) // 2, len(dataset) - 1):
            for name, array in sorted(dataset[index].items()):
                digest.update(name.encode() + array.tobytes())
        texts[f"{split} data"] = (
            f"{len(dataset)} samples; three of them have the hash {digest.hexdigest()[:DIGITS]}"
        )
    return texts


def data_bytes(data: DataConfig) -> dict[str, int]:
    """Return the bytes of each file that holds tokens or examples of the run."""
    groups = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    names = [name for group in groups for name in group or ()]
    paths = [Path(name if name.endswith(EXAMPLES_SUFFIX) else f"{name}.bin") for name in names]
    return {str(path): path.stat().st_size for path in paths if path.is_file()}


def open_datasets(
    data: DataConfig,
    fim: FimConfig,
    seq_length: int,
    sizes: tuple[int, int, int],
    seed: int,
    tokenizer: Tokenizer,
    earlier: Sequence[Sequence[int]] = (),
) -> tuple:
    """Training, validation and test datasets; `earlier`: see `build_datasets`."""
    if names_examples(data):
        if fim.fim_rate:
            raise InputError(
                f"--fim-rate {fim.fim_rate:g} is for documents, and the data are examples: "
                "leave it out"
            )
        return build_instructions(data, seq_length, sizes, seed, tokenizer)
    datasets = build_datasets(data, seq_length, sizes, seed, tokenizer.vocab_size, earlier=earlier)
    return filled_in_the_middle(datasets, fim, tokenizer, seed) if fim.fim_rate else datasets
