"""What steps of nodes alone cost in loss: a table of measured values and their sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from zeropp.settings.no_effect_tables import read_toml


@dataclass(frozen=True, kw_only=True)
class LossChange:
    """Percent by which the held-out loss is above that of every step together, as a range."""

    lowest: float
    highest: float
    source: str

    def __str__(self) -> str:
        return f"{self.lowest:+.1f} to {self.highest:+.1f}%"


def loss_change(optimizer: str, interval: int) -> LossChange | None:
    """Return what an interval between exchanges costs; None for one above all in the table.

    The loss grows with the interval, so that the next larger one in the table is a bound.
    """
    by_optimizer = _table()["loss"]
    table = dict(by_optimizer.get(optimizer, by_optimizer["adam"]))
    source = table.pop("source").strip()
    larger = [int(each) for each in table if int(each) >= interval]
    if not larger:
        return None
    lowest, highest = table[str(min(larger))]
    return LossChange(lowest=lowest, highest=highest, source=source)


def compared_intervals() -> tuple[int, ...]:
    """Return the intervals that a plan compares, ascending."""
    return tuple(sorted(_table()["intervals"]))


@cache
def _table() -> Mapping[str, Any]:
    return read_toml(__package__, "local_steps_loss.toml")
