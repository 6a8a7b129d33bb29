"""How long a newcomer waits: for help, for a mistake to be said, for ranks to start, for a loss.

Each command runs in this clone and in that of --against in turn, an earlier commit with a `.venv`.
Wall and processor seconds are medians. `--clones` also times `make pretrain` in fresh clones of
both, from the first command to the first loss of training.
"""

import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement, interleaved
from benchmarks.shared.result import ROOT
from benchmarks.shared.table import Column, table
from zeropp.errors import InputError

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 500 --deepspeed_config examples/ds_code_steps_two_nodes.json --eval-iters 0 "
    "--num-workers 0 --log-interval 1"
).split()
LAUNCH = ["-m", "zeropp.ranks.launcher"]
RANKS = [*LAUNCH, "--num_ranks", "4", "pretrain_gpt.py"]
PATH = ["--data-path", "none", "--tokenizer-type", "ByteLevelTokenizer"]
COMMANDS = {  # what it is: arguments of Python, exit status, what must be printed
    "import zeropp": (["-c", "import zeropp"], 0, ""),
    "zeropp --help": ([*LAUNCH, "--help"], 0, "--num_ranks"),
    "a wrong flag": ([*RANKS, "--num-layer", "2"], 2, "--num-layer"),
    "a wrong path": ([*RANKS, *PATH], 2, "no dataset at none"),
    "four ranks, one step": ([*RANKS, *MODEL], 0, "lm loss: "),
}
CLONES = "git clone, make pretrain, first loss"
FIRST_LOSS = ("iteration 1: loss", "lm loss: ")  # as it is printed now, and as it was


def measure(options: Options, result: dict) -> None:
    """Time each command in turn; raises Disagreement where it does not do what it should."""
    folders = {"here": ROOT, **({"against": options.against} if options.against else {})}
    times: dict[str, dict[str, list]] = {}  # by command and folder
    runs = [(name, place) for name in COMMANDS for place in folders]
    for name, place in interleaved(runs, options.rounds):
        seconds = _run(folders[place], *COMMANDS[name])
        times.setdefault(name, {}).setdefault(place, []).append(seconds)
    if options.clones:
        times[CLONES] = {place: [_first_loss(folder)] for place, folder in folders.items()}
    result["rows"] = [
        {
            "command": name,
            **{
                place: [statistics.median(column) for column in zip(*seconds, strict=True)]
                for place, seconds in of_places.items()
            },
        }
        for name, of_places in times.items()
    ]


def show(result: dict) -> str:
    """A line for each command."""
    columns = [Column("command", "command")]
    for place in [each for each in ("here", "against") if each in result["rows"][0]]:
        for number, kind in enumerate(("wall", "processor")):
            columns.append(
                Column(f"{place}, {kind} s", lambda row, p=place, n=number: row[p][n], ".2f")
            )
    return table(result["rows"], *columns)


def check(options: Options) -> None:
    """Raise InputError for a clone without `.venv`."""
    if options.against is None:
        return
    options.against = Path(options.against).resolve()
    if not (options.against / ".venv/bin/python").exists():
        raise InputError(f"--against {options.against}: expected a clone with a .venv")


def _run(folder: Path, arguments: list[str], status: int, said: str) -> tuple[float, float]:
    """Return the wall and processor seconds of a command and its children."""
    command = [folder / ".venv/bin/python", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    began, used = time.perf_counter(), _used()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - began, _used() - used
    if (done.returncode != 0) != (status != 0) or said not in done.stdout + done.stderr:
        raise Disagreement(f"{folder}: {arguments}: status {done.returncode}\n{done.stderr}")
    return seconds


def _first_loss(folder: Path) -> tuple[float, float]:
    """Return the seconds to the first loss in a fresh clone; processor seconds are of all of it."""
    pipe = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with tempfile.TemporaryDirectory() as temporary:
        began, used = time.perf_counter(), _used()
        subprocess.run(["git", "clone", "--quiet", folder, temporary], check=True)
        process = subprocess.Popen(["make", "pretrain"], cwd=temporary, **pipe)
        if not any(words in line for line in process.stdout for words in FIRST_LOSS):
            raise Disagreement(f"make pretrain in a clone of {folder} printed no loss")
        seconds = time.perf_counter() - began
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
        return seconds, _used() - used


def _used() -> float:
    """Return the processor seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


OPTIONS = (
    Flag("--against", None, "a clone of an earlier commit, with a .venv"),
    Flag("--rounds", 3, "times that each command runs", least=1),
    Flag("--clones", False, "time make pretrain in fresh clones too; minutes"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, check=check)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
