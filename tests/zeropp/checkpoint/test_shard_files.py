"""Errors while ranks write a checkpoint together."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from zeropp.checkpoint import shard_files
from zeropp.ranks.coordination import RankError


class Stopped(BaseException):
    """What a signal's handler raises, wherever the rank is."""


def stop(*_: object) -> None:
    raise Stopped("stopped")


@ranks(2)
def test_a_rank_that_is_stopped_while_it_saves_ends_as_stopped(tmp_path: Path):
    """torch collects what ranks raise, and would raise an exception of its own on all of them."""
    is_stopped = dist.get_rank() == 1
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Stopped if is_stopped else RankError, match="stopped"),
        shard_files.os_errors_as_input_errors("cannot save"),
    ):
        if is_stopped:
            patch.setattr(shard_files._Writer, "write_data", stop)
        shard_files.write_shards(tmp_path, {"weight": torch.ones(4)})
