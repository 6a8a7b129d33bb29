"""The micro-batches of a run's splits."""

from collections.abc import Sequence

from megatron_zpp.data.loader import Loader
from megatron_zpp.train.run import Run

TRAIN, VALIDATION, TEST = range(3)


def loader(run: Run, split: int, consumed_samples: int, skipped: Sequence[range] = ()) -> Loader:
    """This rank's micro-batches of a split, after the first `consumed_samples` of all ranks.

    The samples of `skipped`, ranges of whole global batches, are passed over.
    """
    return Loader(
        run.datasets[split],
        run.config.data,
        consumed_samples=consumed_samples,
        micro_batch_size=run.config.batch.micro_batch_size,
        rank=run.ranks.replica,
        world=run.ranks.num_replicas,
        eod=run.tokenizer.eod,
        device=run.ranks.device,
        skipped=skipped,
    )
