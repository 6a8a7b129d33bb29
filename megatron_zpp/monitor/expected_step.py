"""What a plan (the JSON of `megatron-zpp plan`) expected of a step, and what steps take."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """Seconds of a step, as a range, and what they rest on."""

    fastest: float
    typical: float
    slowest: float
    basis: str

    def __str__(self) -> str:
        return (
            f"{self.typical:.3g} s a step expected ({self.fastest:.3g} to {self.slowest:.3g}); "
            f"{self.basis}"
        )


class StepWatch:
    """Tells once, after the first iterations, whether steps take longer than `expected`.

    The first `WARM_UP` iterations, which allocate memory and open connections, do not count.
    """

    WARM_UP, LAST = 5, 20  # iterations of a process

    def __init__(self, expected: ExpectedStep) -> None:
        self.expected = expected
        self._seconds: list[float] = []

    def warning(self, seconds: float) -> str | None:
        """Add a step; return a line after the last of the first ones if they are too slow."""
        if len(self._seconds) >= self.LAST:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < self.LAST:
            return None
        median = statistics.median(self._seconds[self.WARM_UP :])
        if median <= self.expected.slowest:
            return None
        return (
            f"warning: a step takes {median:.3g} s, the median of {self.LAST - self.WARM_UP}, and "
            f"the plan expected {self.expected.fastest:.3g} to {self.expected.slowest:.3g}: look "
            "at the links between the nodes and at the clocks before the run goes on"
        )


def read_expected_step(path: str, key: Mapping[str, Any]) -> ExpectedStep:
    """Return what the plan in a file expected of a run with this `Config.step_key`.

    Raises InputError for a file that is no plan, and for one without this run.
    """
    try:
        plan = json.loads(Path(path).read_text("utf-8"))
        basis, rows = plan["cluster"]["basis"], plan["rows"]
        keys = [row["key"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--plan-file {path}: expected what megatron-zpp plan writes with --json ({error})"
        ) from None
    for row in rows:
        if row["key"] == key and "step_s" in row:
            fastest, slowest = row["fastest_s"], row["slowest_s"]
            return ExpectedStep(
                fastest=fastest, typical=row["step_s"], slowest=slowest, basis=basis
            )
    nearest = max(
        keys, key=lambda other: sum(other.get(name) == key[name] for name in key), default={}
    )
    different = [f"{name} {nearest.get(name)}" for name in key if nearest.get(name) != key[name]]
    raise InputError(
        f"--plan-file {path}: the plan has no time of this run; the nearest in it has "
        f"{', '.join(different) or 'no time, as it does not fit'}: plan again with this run's flags"
    )
