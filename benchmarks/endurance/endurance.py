"""Does a run survive whatever a cluster does to it, and end with the digits it would have had?

Four ranks train under torchrun on two emulated nodes, and save every few iterations. At random
moments something is broken, as --kinds says.

Every round breaks all kinds in a random order. After each the job must go on by itself: load a
checkpoint at most one save interval before the point it had reached (two after `truncate`), and
pass that point. Then an undisturbed job runs to the same iteration, and its losses must be equal to
the last digit. Needs root, and the commands ip, tc and mount.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cluster.network import emulation
from benchmarks.endurance.disturbances import KINDS
from benchmarks.endurance.job import Job, started_job
from benchmarks.endurance.resources import Recorder
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.processes import exit_on_signals
from benchmarks.shared.table import Column, table

RECOVERY_SECONDS = 300  # until a job that needs no hand has passed the point it had reached
POLL_SECONDS = 0.1
MEANINGS = "; ".join(f"{name}: {kind.meaning}" for name, kind in KINDS.items())
COLUMNS = (
    Column("", lambda row: f"{row['kind']}: {row['what']}"),
    Column("after s", "at", ".0f"),
    Column("reached", "reached"),
    Column("resumed at", lambda row: row["resumed"] if row["restarted"] else "no restart"),
    Column("took s", "seconds", ".1f"),
)


def measure(options: Options, result: dict) -> None:
    """Run the campaign, then the undisturbed job, and compare."""
    exit_on_signals()
    emulation.require_namespaces()
    result["options"] = dict(vars(options))
    with tempfile.TemporaryDirectory(prefix="zeropp-endurance-") as folder:
        answer, losses = Campaign(options).disturbed(Path(folder) / "disturbed")
        result |= answer
        result["undisturbed"] = Campaign(options).undisturbed(Path(folder) / "undisturbed", losses)


class Campaign:
    """A job, and what is recorded of its processes."""

    def __init__(self, options: Options) -> None:
        self._options, self._random = options, random.Random(options.seed)
        self._recorder, self._started = Recorder(), time.monotonic()
        self._flags = ["--save-interval", str(options.save_interval)]
        self._flags += ["--async-save"] if options.async_save else []

    def disturbed(self, folder: Path) -> tuple[dict, dict[int, float]]:
        """Disturb the job for `--minutes`; returns what happened, and its losses.

        Raises Disagreement if it does not go on by itself.
        """
        options, rows = self._options, []
        with started_job(folder, options.limit, self._flags) as job:
            self._started = time.monotonic()
            self._wait(job, lambda: len(job.losses()) > 2 * options.save_interval)
            for number, kind in enumerate(self._kinds()):
                is_late = time.monotonic() - self._started > 60 * options.minutes
                if is_late and number >= len(options.kinds):
                    break
                rows.append(self._disturb(job, kind))
                print(table(rows[-1:], *COLUMNS), file=sys.stderr, flush=True)
            answer = {
                "disturbances": rows,
                "seconds": time.monotonic() - self._started,
                "agents_started": [node.agents_started for node in job.nodes],
                "resources": self._recorder.result(),
            }
            return answer, job.losses()

    def undisturbed(self, folder: Path, expected: dict[int, float]) -> dict:
        """Run a job to the iteration that the disturbed one reached, and compare their losses."""
        last, reached = max(expected), 0
        with started_job(folder, self._options.limit, self._flags) as job:
            end = self._started + 60 * self._options.undisturbed_minutes
            while reached < last or time.monotonic() < end:
                self._wait(job, lambda at=reached: max(job.losses(), default=0) > at)
                reached = max(job.losses())
            losses = job.losses()
        require_equal(expected, losses)
        return {
            "seconds": time.monotonic() - self._started,
            "iterations": max(losses),
            "equal_losses": last,
            "resources": self._recorder.result(),
        }

    def _kinds(self) -> Iterator[str]:
        while True:
            yield from self._random.sample(self._options.kinds, len(self._options.kinds))

    def _disturb(self, job: Job, kind: str) -> dict:
        """Break something, wait until the job has passed the point it had reached."""
        end = time.monotonic() + self._random.uniform(0, self._options.pause)
        self._wait(job, lambda: time.monotonic() > end)
        attempts, began = len(job.resumed()), time.monotonic()
        what = KINDS[kind].act(job, self._random, self._options.limit)
        reached, resumed = self._recover(job, attempts)
        lost, most = reached - resumed, self._options.save_interval * (1 + (kind == "truncate"))
        if lost > most:
            raise Disagreement(f"after {kind} ({what}) {lost} iterations were lost, at most {most}")
        return {
            "kind": kind,
            "what": what,
            "at": began - self._started,
            "reached": reached,
            "resumed": resumed,
            "restarted": len(job.resumed()) > attempts,
            "seconds": time.monotonic() - began,
        }

    def _recover(self, job: Job, attempts: int) -> tuple[int, int]:
        """Wait until the job is past the next save; return where it was and where it resumed.

        `attempts` is how often it had resumed before. The two are equal if it went on without a
        restart, as it may when the link comes back.
        """
        reached = at_first = max(job.losses(), default=0)
        interval = self._options.save_interval

        def goes_on() -> bool:
            nonlocal reached
            if len(job.resumed()) > attempts:
                return True
            reached = max([reached, *job.losses()])
            return reached > at_first + interval

        self._wait(job, goes_on)
        resumed = job.resumed()[attempts:]
        self._wait(job, lambda: max(job.losses(), default=0) > reached + interval)
        return reached, resumed[0] if resumed else reached

    def _wait(self, job: Job, condition: Callable[[], bool]) -> None:
        """Supervise and record the job until `condition()`; Disagreement if it takes too long."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise Disagreement(f"the job does not go on by itself:\n{job.text()[-8000:]}")
            job.supervise()
            self._recorder.record_if_due(job.processes())
            time.sleep(POLL_SECONDS)


def require_equal(expected: dict[int, float], losses: dict[int, float]) -> None:
    """Raise Disagreement unless all of `expected`, from iteration 1 on, are equal to `losses`."""
    last = max(expected)
    different = [n for n in range(1, last + 1) if n not in expected or losses.get(n) != expected[n]]
    if different:
        first = different[0]
        raise Disagreement(
            f"{len(different)} of {last} losses differ; at iteration {first}: "
            f"{expected.get(first)!r}, undisturbed {losses.get(first)!r}"
        )


def show(result: dict) -> str:
    """The disturbances, and what processes have taken over time."""
    rows, minutes = result["disturbances"], result["seconds"] / 60
    growth = [
        {"run": title, "process": name, "samples": len(values["samples"]), **values["growth"]}
        for title, part in (("disturbed", result), ("undisturbed", result["undisturbed"]))
        for name, values in part["resources"].items()
    ]
    resources = table(
        growth,
        *(Column(name, name) for name in ("run", "process", "samples")),
        Column("memory, MiB", "memory", "+.1f", 2**-20),
        *(Column(name, name, "+.0f") for name in ("descriptors", "threads")),
    )
    return (
        f"{table(rows, *COLUMNS)}\n\n"
        f"{len(rows)} disturbances in {minutes:.1f} minutes, {len(rows) / minutes:.2f} per minute; "
        f"{result['undisturbed']['equal_losses']} losses equal to the last digit\n\n{resources}"
    )


OPTIONS = (
    Flag("--minutes", 10.0, "how long; the first round is always completed"),
    Flag("--undisturbed-minutes", 0.0, "how long at least without trouble"),
    Flag("--kinds", tuple(KINDS), MEANINGS, choices=tuple(KINDS)),
    Flag("--seed", 0, "of the moments, the order and the ranks"),
    Flag("--save-interval", 10, "iterations between checkpoints", least=1),
    Flag("--async-save", False, "the job saves beside training"),
    Flag("--limit", 20.0, "seconds: the job's time limit for collectives"),
    Flag("--pause", 3.0, "seconds from a recovery to the next disturbance, at most"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
