"""Compare training loops on all ranks of a process group: verify them, then time them in turn.

Only medians and ratios of steps of the same round are reported, with the quartiles of the ratios.
"""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.shared.interleaved import interleaved, ratio_summary
from benchmarks.shared.training_setup import TrainingSetup, largest_of_ranks
from benchmarks.step.step_verification import (
    first_steps,
    largest_differences,
    require_agreement,
    tolerances,
)
from benchmarks.step.training_loops import (
    TrainingLoop,
    fsdp2,
    local_weights,
    ours,
    plain_pytorch,
    sharded,
    zeropp_loop,
)

VERIFIED_STEPS = 3
WARM_UP = 1  # steps of each loop after verification


def compare_on_one_rank(setup: TrainingSetup, rounds: int) -> dict:
    """fp32 on one rank: our step against plain PyTorch loops over the same layers."""
    steps = setup.steps(VERIFIED_STEPS + WARM_UP + rounds)
    loops = [
        plain_pytorch(setup, "bare PyTorch loop", iter(steps)),
        plain_pytorch(setup, "bare loop, PyTorch's loss", iter(steps), torch_loss=True),
        ours(setup),
    ]
    return _compare("one rank", setup, loops, rounds)


def compare_on_many_ranks(setup: TrainingSetup, rounds: int) -> dict:
    """Stage 3 on several ranks: our step against plain FSDP2, and the gain from each part."""
    steps = setup.steps(VERIFIED_STEPS + WARM_UP + rounds)
    loops = [
        fsdp2(setup, "plain FSDP2", iter(steps)),
        fsdp2(setup, "FSDP2 + our reduce-scatter", iter(steps), all_to_all=True),
        fsdp2(setup, "FSDP2 + gathers ahead", iter(steps), ahead=True),
        fsdp2(setup, "FSDP2 + both", iter(steps), all_to_all=True, ahead=True),
        zeropp_loop(setup, "zeropp in a plain loop", iter(steps)),
        ours(setup),
    ]
    return _compare(f"{setup.ranks.num_ranks} ranks, stage 3", setup, loops, rounds)


def compare_attached(setup: TrainingSetup, rounds: int) -> dict:
    """All of ZeRO++ in one loop: by `zeropp.shard`, twice, and by `zeropp.attach`."""
    steps = setup.steps(VERIFIED_STEPS + WARM_UP + rounds)
    loops = [
        sharded(setup, "zeropp.shard", iter(steps)),
        sharded(setup, "zeropp.shard again", iter(steps)),
        fsdp2(setup, "zeropp.attach", iter(steps), attached=True),
    ]
    return _compare(f"{setup.ranks.num_ranks} ranks, ZeRO++", setup, loops, rounds)


def verify(loops: Sequence[TrainingLoop], setup: TrainingSetup) -> dict:
    """Train each for a few steps; raise Disagreement unless all agree with the first.

    Returns the largest relative differences: of losses, of gradient norms, and of the updates of
    all weights (L2 norm of the difference over that of the first's update).
    """
    reference, *others = loops
    before = _copied_weights(reference)
    history = first_steps(reference, setup, VERIFIED_STEPS)
    expected = _update(reference, before)
    allowed = tolerances(setup.dtype, setup.ranks.num_ranks)
    largest = dict.fromkeys(allowed, 0.0)
    for loop in others:
        differences = largest_differences(first_steps(loop, setup, VERIFIED_STEPS), history)
        differences["update"] = _distance(_update(loop, before), expected, setup)
        require_agreement(loop.name, reference.name, differences, allowed)
        largest = {name: max(largest[name], differences[name]) for name in largest}
    return {"steps": VERIFIED_STEPS, "differences": largest, "allowed": allowed}


def _compare(name: str, setup: TrainingSetup, loops: Sequence[TrainingLoop], rounds: int) -> dict:
    verified = verify(loops, setup)
    for loop in loops:
        for _ in range(WARM_UP):
            loop.step()()
    seconds, processor_seconds = _time_in_turn(loops, setup, rounds)
    reference = loops[0].name
    return {
        "name": f"{name}, {setup.dtype}",
        "ranks": setup.ranks.num_ranks,
        "dtype": setup.dtype,
        "device": setup.ranks.device.type,
        "threads": torch.get_num_threads(),
        "verified": verified,
        "reference": reference,
        "loops": [_row(loop.name, reference, seconds, processor_seconds) for loop in loops],
    }


def _row(
    name: str,
    reference: str,
    seconds: Mapping[str, list[float]],
    processor_seconds: Mapping[str, list[float]],
) -> dict:
    median, processor = (
        {loop: statistics.median(times[loop]) for loop in (name, reference)}
        for times in (seconds, processor_seconds)
    )
    return {
        "name": name,
        "median": median[name],
        "ratio": median[name] / median[reference],
        "quartiles": ratio_summary(seconds[name], seconds[reference])["quartiles"],
        "processor_ratio": processor[name] / processor[reference],
        "seconds": seconds[name],
        "processor_seconds": processor_seconds[name],
    }


def _time_in_turn(
    loops: Sequence[TrainingLoop], setup: TrainingSetup, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of each loop's steps: seconds on the slowest rank, and processor seconds of all ranks."""
    seconds: dict[str, list[float]] = {loop.name: [] for loop in loops}
    processor_seconds: dict[str, list[float]] = {loop.name: [] for loop in loops}
    for loop in interleaved(loops, rounds):
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        loop.step()()
        if setup.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        seconds[loop.name].append(largest_of_ranks(wall, setup.ranks.device))
        processor_seconds[loop.name] += setup.ranks.sum(processor)
    return seconds, processor_seconds


def _copied_weights(loop: TrainingLoop) -> list[Tensor]:
    """Copies of this rank's shards in fp64."""
    return [weight.double() for weight in local_weights(loop.model).values()]


def _update(loop: TrainingLoop, before: Sequence[Tensor]) -> list[Tensor]:
    """How far this rank's weights have moved from `before`."""
    pairs = zip(_copied_weights(loop), before, strict=True)
    return [after - start for after, start in pairs]


def _distance(update: Sequence[Tensor], expected: Sequence[Tensor], setup: TrainingSetup) -> float:
    """L2 norm of the difference over all ranks, relative to that of `expected`."""
    pairs = zip(update, expected, strict=True)
    squares = sum((mine - right).square().sum().item() for mine, right in pairs)
    length = sum(right.square().sum().item() for right in expected)
    squares, length = setup.ranks.sum(squares, length)
    return (squares / length) ** 0.5
