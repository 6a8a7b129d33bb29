"""How long a training step takes beside plain PyTorch, and the memory of each ZeRO stage.

Every comparison is verified before it is timed. All training loops run in the same processes, one
step each in turn. One rank, fp32: the step of pretrain_gpt.py against a plain loop over the same
layers. Several ranks, stage 3: against plain FSDP2 with the same dtypes on the wire. In two nodes,
with all of ZeRO++: `zeropp.attach` against `zeropp.shard`, and that against itself. Memory: bytes
per parameter at every stage, beside the formula of docs/memory.md.
"""

import dataclasses
import sys

import torch

from benchmarks.memory.model_state import count_stages
from benchmarks.shared.benchmark import Benchmark, Flag, Options, shape_text
from benchmarks.shared.rank_processes import run_on_ranks
from benchmarks.shared.table import Column, table
from benchmarks.shared.training_setup import DTYPES, TrainingSetup, joined_ranks
from benchmarks.shared.zero_json import json_flag, zero_json
from benchmarks.step.comparison import (
    LOOP_COLUMNS,
    VERIFIED_STEPS,
    TimedLoop,
    time_in_turn,
    verify,
)
from benchmarks.step.training_loops import TrainingLoop, fsdp2, ours, plain_pytorch, sharded

PARTS = ("one-rank", "many-ranks", "attach", "memory")
WARM_UP = 1  # steps of each loop after verification


def measure(options: Options, result: dict) -> None:
    """Run the parts asked for, on as many ranks as each needs."""
    result |= {"rounds": options.rounds, "comparisons": [], "memory": []}
    needed = {
        "one-rank": (1,),
        "many-ranks": (options.ranks,),
        "attach": (options.ranks,),
        "memory": options.memory_ranks,
    }
    for count in sorted({count for part in options.parts for count in needed[part]}):
        alone = count == 1
        answer = on_rank(options) if alone else run_on_ranks(__spec__.name, count, options)
        result["comparisons"] += answer["comparisons"]
        result["memory"] += answer["memory"]


def on_rank(options: Options) -> dict:
    """This rank's part of everything that needs as many ranks as there are."""
    setup = TrainingSetup(shape=options.shape, ranks=joined_ranks())
    count, answer = setup.ranks.num_ranks, {"comparisons": [], "memory": []}
    if "one-rank" in options.parts and count == 1:
        answer["comparisons"].append(compare("one rank", setup, options.rounds))
    for part, title in (("many-ranks", "stage 3"), ("attach", "ZeRO++")):
        if part in options.parts and count == options.ranks:
            for dtype in options.dtypes:
                of_dtype = dataclasses.replace(setup, dtype=dtype)
                comparison = compare(f"{count} ranks, {title}", of_dtype, options.rounds)
                answer["comparisons"].append(comparison)
    if "memory" in options.parts and count in options.memory_ranks:
        for dtype in options.dtypes:
            answer["memory"] += count_stages(setup, dtype)
    return answer


def compare(title: str, setup: TrainingSetup, rounds: int) -> dict:
    """Verify the loops that a title is about, and time one step of each in turn."""
    loops = loops_of(title, setup, VERIFIED_STEPS + WARM_UP + rounds)
    verified = verify(loops, setup)
    timed = [TimedLoop(loop=loop) for loop in loops]
    time_in_turn(timed, setup, rounds)
    return {
        "name": f"{title}, {setup.dtype}",
        "ranks": setup.ranks.num_ranks,
        "dtype": setup.dtype,
        "device": setup.ranks.device.type,
        "threads": torch.get_num_threads(),
        "verified": verified,
        "reference": loops[0].name,
        "loops": [each.row(timed[0]) for each in timed],
    }


def loops_of(title: str, setup: TrainingSetup, num_steps: int) -> list[TrainingLoop]:
    """The loops of a comparison; the first one is the reference."""
    steps = setup.steps(num_steps)
    if title == "one rank":
        return [plain_pytorch(setup, "bare PyTorch loop", iter(steps)), ours(setup)]
    if title.endswith("stage 3"):
        return [fsdp2(setup, "plain FSDP2", iter(steps)), ours(setup)]
    zero = zero_json("zeropp", setup.ranks.num_ranks // 2)
    nodes = dataclasses.replace(setup, extra_flags=json_flag(zero))
    return [
        sharded(nodes, "zeropp.shard", iter(steps)),
        sharded(nodes, "zeropp.shard again", iter(steps)),
        fsdp2(nodes, "zeropp.attach", iter(steps), attached=True),
    ]


def show(result: dict) -> str:
    """A table for each comparison, and one of the memory."""
    parts = [f"shape: {shape_text(result)}"]
    for each in result["comparisons"]:
        differences = each["verified"]["differences"].items()
        verified = ", ".join(f"{quantity} within {value:.1e}" for quantity, value in differences)
        threads = f"{each['ranks']} x {each['threads']} threads, {each['device']}"
        parts.append(f"{each['name']} ({threads}); verified: {verified}")
        parts.append(table(each["loops"], *LOOP_COLUMNS))
    if result["memory"]:
        parts.append("bytes per parameter: weights, gradients, Adam's moments, in a step")
        parts.append(
            table(
                result["memory"],
                *(Column(name, name) for name in ("ranks", "stage", "dtype")),
                Column("measured", "measured", ".2f"),
                Column("formula", "formula", ".2f"),
                Column("difference", "difference", "+.1%"),
                Column("paper", "paper", ".2f"),
            )
        )
    return "\n\n".join(parts)


OPTIONS = (
    Flag("--parts", PARTS, choices=PARTS),
    Flag("--dtypes", tuple(DTYPES), choices=tuple(DTYPES)),
    Flag("--ranks", 4, "for many-ranks and attach"),
    Flag("--memory-ranks", (1, 2, 4), "for the part memory"),
    Flag("--rounds", 12, "timed steps of each loop"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, shape={})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
