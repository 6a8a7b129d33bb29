"""Runs on four ranks that stop after two iterations and go on, beside runs that do not."""

from collections.abc import Callable
from pathlib import Path

import torch

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights, find_checkpoint
from tests.megatron_zpp.train.training_runs import losses, require_equal, run

ALL_THREE = {  # with two ranks to a node
    "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}  # fmt: skip


def require_numbers_of_one_rank(
    model: str, ranks: Callable[[], str], folder: Path
) -> tuple[str, str]:
    """Require the losses, norms and buffers of one rank; return the logs of four ranks and of one.

    `ranks` returns the flags of the ranks, perhaps others after the stop.
    """
    expected, log = run(1, f"{model} --save {folder}/one", folder), ""
    end = f"--load {folder}/saved --save {folder}/end"
    for flags in (f"--save {folder}/saved --exit-interval 2", end):
        how = ranks()
        print(model, how)
        log += run(4, f"{model} {how} {flags}", folder)
    require_equal(log, expected)
    require_same_buffers(folder / "end", folder / "one")
    return log, expected


def require_same_buffers(folder: Path, other: Path) -> None:
    """Require the same biases of routers in the newest checkpoints of two folders."""
    own, others = (CheckpointWeights(find_checkpoint(each)) for each in (folder, other))
    for name in own.facts():
        if name.endswith("expert_bias"):
            # Sums of a few steps of one size, up or down.
            torch.testing.assert_close(own.read(name), others.read(name), rtol=1e-6, atol=1e-7)


def require_no_digit_lost(flags: str, folder: Path) -> str:
    """Require the digits of a run without a stop; return the log of the part after it."""
    print(flags)
    straight = losses(run(4, flags, folder))
    first = run(4, f"{flags} --save {folder}/saved --exit-interval 2", folder)
    second = run(4, f"{flags} --load {folder}/saved", folder)
    assert losses(first) + losses(second) == straight != []
    return second
