"""Runs on four ranks that stop after two iterations and go on, beside runs that do not."""

from collections.abc import Callable
from pathlib import Path

from tests.megatron_zpp.train.training_runs import losses, require_equal, run

ALL_THREE = {  # with two ranks to a node
    "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}  # fmt: skip


def require_numbers_of_one_rank(
    model: str, ranks: Callable[[], str], folder: Path
) -> tuple[str, str]:
    """Require the losses and norms of one rank; return the logs of four ranks and of one.

    `ranks` returns the flags of the ranks, perhaps others after the stop.
    """
    expected, log = run(1, model, folder), ""
    for flags in (f"--save {folder}/saved --exit-interval 2", f"--load {folder}/saved"):
        how = ranks()
        print(model, how, (folder / "zeropp.json").read_text())
        log += run(4, f"{model} {how} {flags}", folder)
    require_equal(log, expected)
    return log, expected


def require_no_digit_lost(flags: str, folder: Path) -> str:
    """Require the digits of a run without a stop; return the log of the part after it."""
    print(flags, (folder / "zeropp.json").read_text())
    straight = losses(run(4, flags, folder))
    first = run(4, f"{flags} --save {folder}/saved --exit-interval 2", folder)
    second = run(4, f"{flags} --load {folder}/saved", folder)
    assert losses(first) + losses(second) == straight != []
    return second
