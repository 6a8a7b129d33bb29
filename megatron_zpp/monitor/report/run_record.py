"""What a run leaves in its TensorBoard folder for the report: `metrics.jsonl` and `run.json`.

`metrics.jsonl` is read instead of TensorBoard's event files, whose reader takes 40 seconds for the
curves of 100,000 iterations: more than a launcher leaves an interrupted rank.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zeropp.atomic import write_atomically
from zeropp.errors import InputError

JSON_LINES, RUN_FACTS, REPORT = "metrics.jsonl", "run.json", "report.html"
SENT, PLAIN = "comm/", "comm/plain_"  # begin the names of bytes, which end with a hop
ACROSS_NODES, IN_NODE = "across_nodes", "in_node"
Rows = Sequence[tuple[str, str]]
Point = tuple[float, float]  # iteration, value


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run is, apart from its numbers over iterations.

    `table` has the rows printed before training, `settings` all flags by section, and the JSON as
    `zero`. `forecast` gives the bytes that a node was expected to send in a step, by purpose and
    hop ("gradients_across_nodes"). `expected_step` has the seconds of a step in the plan of
    `--plan-file`, and what they rest on. `optimizer_flops` are those of the optimizer on
    rank 0 in a step, which no rate of the model's operations includes.
    """

    command: Sequence[str] = ()
    version: str = ""
    train_iters: int = 0
    zero_stage: int = 0
    table: Rows = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    forecast: Mapping[str, float] = field(default_factory=dict)
    expected_step: Mapping[str, Any] | None = None
    sample: str | None = None
    optimizer_flops: int | None = None

    def write(self, folder: Path) -> None:
        """Write `run.json` in `folder`."""
        write_atomically(folder / RUN_FACTS, json.dumps(asdict(self), indent=1, default=str))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as it was recorded: `intervals` are those of the log lines, `held_out` the evaluations.

    Both are the objects of `metrics.jsonl`, in the order of iterations.
    """

    folder: Path
    facts: RunFacts
    intervals: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]

    @cached_property
    def iterations(self) -> int:
        """How many are done, as far as they were logged."""
        return self.intervals[-1]["iteration"] if self.intervals else 0

    @cached_property
    def lengths(self) -> list[int]:
        """Iterations of each interval."""
        ends = [interval["iteration"] for interval in self.intervals]
        return [max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def tokens_per_second(self) -> list[float]:
        """Of all ranks, in each interval."""
        ends = [interval["consumed_tokens"] for interval in self.intervals]
        return [
            (end - start) / length / interval["seconds_per_iteration"]
            for start, end, length, interval in zip(
                [0, *ends], ends, self.lengths, self.intervals, strict=False
            )
        ]

    @cached_property
    def hop(self) -> str:
        """Where bytes are compared: between nodes, or in the node if there is only one."""
        crosses = any(each.get(f"comm/{ACROSS_NODES}") for each in self.intervals)
        return ACROSS_NODES if crosses else IN_NODE

    @cached_property
    def purposes(self) -> list[str]:
        """What was sent over `hop`: "weights_forward", "gradients" and so on."""
        names = dict.fromkeys(name for interval in self.intervals for name in interval)
        matches = (re.fullmatch(rf"{PLAIN}(.+)_{self.hop}", name) for name in names)
        return [match[1] for match in matches if match]

    def points(self, name: str) -> list[Point]:
        """A curve over iterations: the finite values of a field."""
        return [
            (interval["iteration"], interval[name])
            for interval in self.intervals
            if interval.get(name) is not None and math.isfinite(interval[name])
        ]

    def sent_points(self, purpose: str) -> list[Point]:
        """Bytes per node and step over `hop` for a purpose, where bytes were counted.

        A replica without others sends nothing, and writes no such bytes.
        """
        first = f"{SENT}{self.purposes[0]}_{self.hop}"
        name = f"{SENT}{purpose}_{self.hop}"
        return [
            (each["iteration"], each.get(name, 0.0)) for each in self.intervals if first in each
        ]

    def held_out_points(self, split: str = "validation") -> list[Point]:
        """The held-out losses over iterations; of one iteration the last."""
        name = f"{split}_loss"
        losses = {each["iteration"]: each[name] for each in self.held_out if name in each}
        return [(iteration, loss) for iteration, loss in losses.items() if math.isfinite(loss)]

    def mean_bytes(self, prefix: str) -> dict[str, float]:
        """Bytes per node and step over `hop` by purpose, means over the whole run.

        `prefix` is `SENT` for what was sent, `PLAIN` for what plain ZeRO would have sent.
        """
        counted = [
            (length, interval)
            for length, interval in zip(self.lengths, self.intervals, strict=True)
            if f"{prefix}{self.purposes[0]}_{self.hop}" in interval
        ]
        steps = sum(length for length, _ in counted)
        return {
            purpose: sum(
                length * interval.get(f"{prefix}{purpose}_{self.hop}", 0.0)
                for length, interval in counted
            )
            / steps
            for purpose in self.purposes
        }

    def forecast_bytes(self) -> dict[str, float]:
        """Bytes per node and step over `hop` by purpose, as printed before training."""
        forecast = self.facts.forecast
        return {purpose: forecast.get(f"{purpose}_{self.hop}", 0.0) for purpose in self.purposes}


def warmed_up_median(values: Sequence[float]) -> float | None:
    """The median of intervals, without the first if there are others: it opens connections."""
    later = values[1:] or values
    return statistics.median(later) if later else None


def read_record(folder: Path) -> RunRecord:
    """Read what a run has recorded so far; raises InputError if there is nothing."""
    lines = []
    path = folder / JSON_LINES
    try:
        if path.exists():
            text = path.read_text().splitlines(keepends=True)
            lines = [json.loads(line) for line in text if line[-1] == "\n"]  # all but a torn one
    except ValueError as error:
        raise InputError(f"{path}: expected a JSON object in each line ({error})") from None
    if not lines:
        raise InputError(
            f"{folder} has no {JSON_LINES} with log lines: name the --tensorboard-dir of a run, or "
            "the folder that contains it"
        )
    facts = RunFacts()
    if (folder / RUN_FACTS).exists():  # a run that was killed before its first log line has none
        facts = RunFacts(**json.loads((folder / RUN_FACTS).read_text()))
    return RunRecord(
        folder=folder,
        facts=facts,
        intervals=[line for line in lines if "seconds_per_iteration" in line],
        held_out=[line for line in lines if "seconds_per_iteration" not in line],
    )
