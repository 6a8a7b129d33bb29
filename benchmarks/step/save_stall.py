"""How long does saving a checkpoint stop training? Synchronous beside asynchronous saves.

The state is that of pretrain_gpt.py on one rank, weights and Adam's moments in fp32. It is
saved both ways first, and all files must be equal byte by byte, or nothing is timed. Then both take
turns. The stall is the time of the call that saves. While an asynchronous save is being written,
one training step is timed, and another one when it is complete.
"""

import filecmp
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement, interleaved, median_of, ratio_summary
from benchmarks.shared.table import RATIOS, Column, table
from benchmarks.shared.timers import WALL_CLOCK, CpuTimer
from benchmarks.shared.training_setup import TrainingSetup, joined_ranks
from benchmarks.step.training_loops import TrainingLoop, ours
from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import checkpoint_folder
from megatron_zpp.checkpoint.training_state import TrainingState
from zeropp.checkpoint.async_save import AsyncWriter

TIMER = CpuTimer(WALL_CLOCK)
SYNCHRONOUS, ASYNCHRONOUS = WAYS = ("synchronous", "asynchronous")

STATE = TrainingState(
    iteration=1, consumed_samples=1, consumed_tokens=1, seed=1, world_size=1, stage=0, tokenizer="x"
)


def measure(options: Options, result: dict) -> None:
    """Build the state, verify, time."""
    loop = ours(TrainingSetup(shape=options.shape, ranks=joined_ranks()), "one rank")
    loop.step()()  # the moments are there after it
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, AsyncWriter() as writer:
        saves = Saves(loop, Path(folder), writer)
        result |= {"rounds": options.rounds, "first_stall": verify(saves), **saves.size()}
        result |= summary([time_round(saves, way) for way in interleaved(WAYS, options.rounds)])
    loop.close()


class Saves:
    """Saves one state in both ways, each in a folder of its own with one checkpoint at a time."""

    def __init__(self, loop: TrainingLoop, folder: Path, writer: AsyncWriter) -> None:
        self.loop, self.writer = loop, writer
        self.folders = {way: folder / way for way in WAYS}

    def seconds(self, way: str) -> float:
        """Save and return how long the call took; an asynchronous save is under way then."""
        folder, loop = self.folders[way], self.loop
        shutil.rmtree(folder, ignore_errors=True)
        writer = self.writer if way == ASYNCHRONOUS else None
        to, given = checkpoint_folder(folder), (loop.model, loop.optimizer, STATE)
        return TIMER.seconds(partial(checkpoint.save, to, *given, writer=writer))

    def differences(self) -> list[str]:
        """Names of the files that differ between the two checkpoints, or that only one has."""
        first, second = (folder / "iter_0000001" for folder in self.folders.values())
        names = sorted({path.name for folder in (first, second) for path in folder.iterdir()})
        _, differing, missing = filecmp.cmpfiles(first, second, names, shallow=False)
        return differing + missing

    def size(self) -> dict:
        """Number of parameters and bytes of a checkpoint."""
        files = (self.folders[SYNCHRONOUS] / "iter_0000001").iterdir()
        parameters = sum(parameter.numel() for parameter in self.loop.model.parameters())
        return {"parameters": parameters, "bytes": sum(path.stat().st_size for path in files)}


def verify(saves: Saves) -> float:
    """Raise Disagreement unless both ways write the same; return the first asynchronous stall."""
    saves.seconds(SYNCHRONOUS)
    stall = saves.seconds(ASYNCHRONOUS)
    saves.writer.finish()
    if differences := saves.differences():
        raise Disagreement(f"synchronous and asynchronous saves differ in {differences}")
    return stall


def time_round(saves: Saves, way: str) -> dict:
    """Seconds of one save, until it is complete, and of a step beside it and after it."""
    started = time.perf_counter()
    stall = saves.seconds(way)
    if way == SYNCHRONOUS:
        return {"way": way, "stall": stall}
    beside = TIMER.seconds(lambda: saves.loop.step()())
    saves.writer.finish()
    complete = time.perf_counter() - started
    alone = TIMER.seconds(lambda: saves.loop.step()())
    return {"way": way, "stall": stall, "complete": complete, "beside": beside, "alone": alone}


def summary(times: list[dict]) -> dict:
    """What was measured by kind of save, and the stall's ratio round by round."""
    of_way = {way: [row for row in times if row["way"] == way] for way in WAYS}
    stalls = {way: [row["stall"] for row in rows] for way, rows in of_way.items()}
    beside = {
        name: [row[name] for row in of_way[ASYNCHRONOUS]]
        for name in ("complete", "beside", "alone")
    }
    return {
        "stall": stalls,
        "stall_ratio": ratio_summary(stalls[ASYNCHRONOUS], stalls[SYNCHRONOUS]),
        **beside,
        "step_ratio": ratio_summary(beside["beside"], beside["alone"]),
    }


def show(result: dict) -> str:
    """What was saved, and how long training stopped."""
    median = {name: median_of(name)(result["stall"]) for name in WAYS}
    rows = [
        {"what": f"{way} save: training stops for", "seconds": median[way]} for way in WAYS
    ]  # fmt: skip
    rows += [
        {"what": "first asynchronous save, into new memory", "seconds": result["first_stall"]},
        {"what": "asynchronous save complete after", "seconds": median_of("complete")(result)},
    ]
    ratios = [
        {"what": "asynchronous / synchronous stall"} | result["stall_ratio"],
        {"what": "a step beside a save / a step alone"} | result["step_ratio"],
    ]
    return (
        f"{result['parameters'] / 1e6:.1f} M parameters, checkpoints of "
        f"{result['bytes'] / 1e9:.2f} GB, equal byte by byte; {result['rounds']} rounds\n\n"
        f"{table(rows, Column('', 'what'), Column('seconds', 'seconds', '.3f'))}\n\n"
        f"{table(ratios, Column('', 'what'), *RATIOS)}"
    )


OPTIONS = (
    Flag("--rounds", 10, "saves of each kind"),
    Flag("--folder", help="where to save (default: the folder for temporary files)"),
)
BENCHMARK = Benchmark(
    __spec__,
    __doc__,
    measure,
    show,
    OPTIONS,
    shape={
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "seq": 64,
        "vocab": 20480,
        "micro_batches": 1,
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
