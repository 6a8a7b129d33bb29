"""Does a run survive whatever a cluster does to it, and end with the digits it would have had?

    python -m benchmarks.endurance.endurance [--minutes 10] [--kinds kill link] [--json FILE]

Four ranks train under torchrun on two emulated nodes, and save every few iterations. At random
moments something is broken:

| kind        | what                                                                       |
|-------------|----------------------------------------------------------------------------|
| `kill`      | SIGKILL to a rank                                                          |
| `stop`      | SIGSTOP to a rank, for good: it hangs                                      |
| `terminate` | SIGTERM to a rank                                                          |
| `node`      | SIGKILL to a node's agent and ranks; its supervisor starts the agent again |
| `link`      | the link between the nodes is cut for longer than the limit                |
| `disk`      | the disk is full until a save has failed                                   |
| `truncate`  | a file of the newest checkpoint is cut, then SIGKILL to a rank             |

Every round breaks all kinds in a random order. After each the job must go on by itself: load a
checkpoint at most one save interval before the point it had reached (two after `truncate`), and
pass that point. Then an undisturbed job runs to the same iteration, and its losses must be equal to
the last digit. Needs root, and the commands ip, tc and mount.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cluster import emulation
from benchmarks.cluster.started_cluster import exit_on_signals
from benchmarks.endurance.disturbances import KINDS
from benchmarks.endurance.job import Job, started_job
from benchmarks.endurance.resources import Recorder
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.result import begin, benchmark_parser, finish, heading, markdown_table
from zeropp.errors import InputError

RECOVERY_SECONDS = 300  # until a job that needs no hand has passed the point it had reached
POLL_SECONDS = 0.1


def main() -> int:
    """Run the campaign, then the undisturbed job, compare, and print the table."""
    options = read_options()
    exit_on_signals()
    result = {**begin(__spec__.name), "options": vars(options)}
    try:
        emulation.require_namespaces()
        with tempfile.TemporaryDirectory(prefix="zeropp-endurance-") as folder:
            disturbed = Campaign(options, Path(folder) / "disturbed")
            result.update(disturbed.run())
            losses = disturbed.losses
            result["undisturbed"] = undisturbed(options, Path(folder) / "undisturbed", losses)
    except (InputError, Disagreement) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10, help="how long; the first round is always completed")
    add("--undisturbed-minutes", type=float, default=0, help="how long at least without trouble")
    add("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="what is broken")
    add("--seed", type=int, default=0, help="of the moments, the order and the ranks")
    add("--save-interval", type=int, default=10, help="iterations between checkpoints")
    add("--async-save", action="store_true", help="the job saves beside training")
    add("--limit", type=float, default=20, help="seconds: the job's time limit for collectives")
    add("--pause", type=float, default=3, help="seconds from a recovery to the next one, at most")
    return parser.parse_args()


def job_flags(options: argparse.Namespace) -> list[str]:
    """The flags of the job that the options determine."""
    flags = ["--save-interval", str(options.save_interval)]
    return [*flags, "--async-save"] if options.async_save else flags


class Campaign:
    """Disturbances of one job, one after the other."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._random = random.Random(options.seed)
        self._recorder = Recorder()
        self.losses: dict[int, float] = {}

    def run(self) -> dict:
        """Disturb the job for `--minutes`; raises Disagreement if it does not go on by itself."""
        options = self._options
        rows = []
        with started_job(self._folder, options.limit, job_flags(options)) as job:
            started = self._started = time.monotonic()
            self._wait(job, lambda: len(job.losses()) > 2 * options.save_interval)
            for number, kind in enumerate(self._kinds()):
                is_late = time.monotonic() - started > 60 * options.minutes
                if is_late and number >= len(options.kinds):
                    break
                rows.append(self._disturb(job, kind))
                print(row_text(rows[-1]), file=sys.stderr, flush=True)
            seconds = time.monotonic() - started
            self.losses = job.losses()
            agents = [node.agents_started for node in job.nodes]
        return {
            "disturbances": rows,
            "seconds": seconds,
            "agents_started": agents,
            "resources": self._recorder.result(),
        }

    def _kinds(self) -> Iterator[str]:
        for _ in itertools.count():
            yield from self._random.sample(self._options.kinds, len(self._options.kinds))

    def _disturb(self, job: Job, kind: str) -> dict:
        """Break something, wait until the job has passed the point it had reached."""
        end = time.monotonic() + self._random.uniform(0, self._options.pause)
        self._wait(job, lambda: time.monotonic() > end)
        attempts = len(job.resumed())
        began = time.monotonic()
        what = KINDS[kind](job, self._random, self._options.limit)
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
        """Supervise the job until the condition holds."""
        wait(job, condition, self._recorder)


def wait(
    job: Job, condition: Callable[[], bool], recorder: Recorder, seconds: float = RECOVERY_SECONDS
) -> None:
    """Supervise and record the job until `condition()`; raises Disagreement after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Disagreement(f"the job does not go on by itself:\n{job.text()[-8000:]}")
        job.supervise()
        recorder.record_if_due(job.processes())
        time.sleep(POLL_SECONDS)


def undisturbed(options: argparse.Namespace, folder: Path, expected: dict[int, float]) -> dict:
    """Run a job to the iteration that the disturbed one reached, and compare their losses."""
    recorder, started, last = Recorder(), time.monotonic(), max(expected)
    with started_job(folder, options.limit, job_flags(options)) as job:
        end = started + 60 * options.undisturbed_minutes
        reached = 0
        while reached < last or time.monotonic() < end:
            wait(job, lambda: max(job.losses(), default=0) > reached, recorder)  # noqa: B023
            reached = max(job.losses())
        losses = job.losses()
    require_equal(expected, losses)
    return {
        "seconds": time.monotonic() - started,
        "iterations": max(losses),
        "equal_losses": last,
        "resources": recorder.result(),
    }


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


def show(result: dict) -> None:
    """Print the table."""
    rows, minutes = result["disturbances"], result["seconds"] / 60
    print(heading(result, "torch"))
    print(markdown_table(("", "after s", "reached", "resumed at", "took s"), map(cells, rows)))
    print(
        f"{len(rows)} disturbances in {minutes:.1f} minutes, {len(rows) / minutes:.2f} per minute; "
        f"{result['undisturbed']['equal_losses']} losses equal to the last digit"
    )
    for title, part in (("disturbed", result), ("undisturbed", result["undisturbed"])):
        for name, values in part["resources"].items():
            growth, count = values["growth"], len(values["samples"])
            print(
                f"{title}, {name}, {count} samples: {growth['memory'] / 2**20:+.1f} MiB, "
                f"{growth['descriptors']:+.0f} descriptors, {growth['threads']:+.0f} threads"
            )


def cells(row: dict) -> tuple[str, ...]:
    """A disturbance as cells of the table."""
    what = f"{row['kind']}: {row['what']}"
    resumed = str(row["resumed"]) if row["restarted"] else "no restart"
    return what, f"{row['at']:.0f}", str(row["reached"]), resumed, f"{row['seconds']:.1f}"


def row_text(row: dict) -> str:
    """A disturbance in one line."""
    return " ".join(cells(row))


if __name__ == "__main__":
    sys.exit(main())
