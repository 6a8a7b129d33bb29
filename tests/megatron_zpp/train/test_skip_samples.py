"""--skip-samples: a batch is left out, and all others are trained on as they would have been."""

import re

import pytest
import torch.distributed as dist

from megatron_zpp.data.loader import Loader
from megatron_zpp.settings.config import BatchConfig, DataConfig
from megatron_zpp.settings.scheduled_values import GlobalBatchSize
from tests.megatron_zpp.data.test_loader import Numbered
from tests.megatron_zpp.train.training_runs import log_of, losses
from tests.ranks import ranks

FLAGS = "--train-iters 6 --micro-batch-size 1 --global-batch-size 4 --lr-decay-style constant "


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_the_loader_passes_over_whole_ranges(kind: str) -> None:
    def sample_numbers(consumed: int, *skipped: range) -> list[int]:
        data = DataConfig(num_workers=0, dataloader_type=kind)
        place = {"micro_batch_size": 1, "rank": 0, "world": 2, "eod": 9}
        with Loader(
            Numbered(20), data, consumed_samples=consumed, skipped=skipped, **place
        ) as batches:
            numbers = []
            while batches.consumed_samples < 20:
                numbers += [batches.consumed_samples, int(next(batches).tokens[0, 0]) // 10]
        return numbers

    everything = sample_numbers(0)
    assert sample_numbers(0, range(4, 8), range(8, 10)) == everything[:4] + everything[10:]
    assert sample_numbers(6, range(4, 8)) == everything[8:]
    assert sample_numbers(0, range(12, 20)) == everything[:12]


def test_a_batch_is_left_out_if_any_of_its_samples_is() -> None:
    ramped = GlobalBatchSize(
        BatchConfig(micro_batch_size=1, global_batch_size=8, rampup_batch_size=(4, 4, 8))
    )
    assert [ramped(consumed) for consumed in (0, 4, 8)] == [4, 4, 8]
    assert ramped.batches_with((range(5, 9), range(31, 32)), 0) == (
        range(4, 8), range(8, 16), range(24, 32),
    )  # fmt: skip
    assert ramped.batches_with((range(5, 9),), 16) == ()
    assert ramped.batches_with((), 0) == ()


@ranks(2)
def test_iterations_before_and_the_weights_after_a_gap_are_those_of_the_run(tmp_path) -> None:
    whole = log_of(FLAGS)
    gap = log_of(FLAGS + f"--skip-samples 9:10 --save {tmp_path}/a --save-interval 2")
    if dist.get_rank() == 0:  # the others print nothing
        assert losses(gap)[:2] == losses(whole)[:2] and len(losses(gap)) == len(losses(whole)) - 1
        assert re.findall(r"iteration (\d+) is left out: samples (\S+) ", gap) == [("3", "8:12")]
        assert re.findall(r"iteration +(\d+)/", gap) == ["1", "2", "4", "5", "6"]


@ranks(2)
def test_a_resumed_run_leaves_the_batch_out_that_a_whole_one_does(tmp_path) -> None:
    at_once = log_of(FLAGS + "--skip-samples 8:12 15:16")
    log_of(FLAGS + f"--save {tmp_path} --exit-interval 2")
    rest = log_of(FLAGS + f"--load {tmp_path} --skip-samples 8:12 15:16")
    if dist.get_rank() == 0:
        assert losses(rest) == losses(at_once)[2:] and len(losses(at_once)) == 4
