"""Verify that the contestants train alike, then time them one step each in turn.

Nothing that disagrees is timed: `Disagreement` ends the benchmark. Only medians and ratios of steps
taken in the same minute are reported, with the quartiles of the ratios round by round.
"""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.shared.setting import Setting
from benchmarks.shared.stopwatch import quartiles
from benchmarks.step.contestants import Contestant, bare, fsdp2, ours, steps_of, whole, zeropp_loop

VERIFIED_STEPS = 3
# Adam with its own eps makes a full step of a gradient that is nothing but rounding (the bias of
# the keys has none else). With this eps, far above the clipped gradients, updates are smooth in
# them: an error of 1% in the gradients is one of 1% in the updates, and no more.
SMOOTH_EPS, EPS = 1e-2, 1e-8
WARM_UP = 1  # steps of each contestant after verification


class Disagreement(RuntimeError):
    """Two contestants that should train alike do not."""


def one_rank(setting: Setting, rounds: int) -> dict:
    """fp32 on one rank: our step against bare loops over the same layers."""
    feeds = Feeds(setting, rounds)
    contestants = [
        bare(setting, "bare PyTorch loop", feeds.new()),
        bare(setting, "bare loop, PyTorch's loss", feeds.new(), torch_loss=True),
        ours(setting, "ours"),
    ]
    return _compete("one rank", setting, contestants, rounds)


def many_ranks(setting: Setting, rounds: int) -> dict:
    """Stage 3 on several ranks: ours against plain FSDP2, and what each part of ours gains."""
    feeds = Feeds(setting, rounds)
    contestants = [
        fsdp2(setting, "plain FSDP2", feeds.new()),
        fsdp2(setting, "FSDP2 + our reduce-scatter", feeds.new(), all_to_all=True),
        fsdp2(setting, "FSDP2 + gathers ahead", feeds.new(), ahead=True),
        fsdp2(setting, "FSDP2 + both", feeds.new(), all_to_all=True, ahead=True),
        zeropp_loop(setting, "zeropp in a plain loop", feeds.new()),
        ours(setting, "ours"),
    ]
    return _compete(f"{setting.ranks.num_ranks} ranks, stage 3", setting, contestants, rounds)


class Feeds:
    """The same micro-batches for every contestant, made before the clock starts."""

    def __init__(self, setting: Setting, rounds: int) -> None:
        self._micro_batches = dict(setting.shape)["micro-batches"]
        self._batches = setting.batches(VERIFIED_STEPS + WARM_UP + rounds)

    def new(self):
        return steps_of(self._batches, self._micro_batches)


def tolerances(dtype: str, num_ranks: int) -> tuple[float, float]:
    """How far losses, and updates or norms of gradients, of two right contestants may be apart.

    fp32: a gradient sums some 2^11 terms in another order, 2^5.5 roundings of 2^-24 = 3e-6, and the
    update of a weight is rounded to the weight's own spacing, as much again; ten times that for
    three steps. Losses: the promise of 1e-5.
    16 bit: W gradients, each rounded by 2^-9 on the way and W - 1 times more where the sum itself
    is in 16 bit, are up to sqrt(W) times as large as their mean if they have nothing in common:
    (W + 1) sqrt(W) 2^-9 for both contestants together. A loss is off by one rounding of its logits.
    """
    if dtype == "fp32":
        return 1e-5, 1e-4
    return 2.0**-9, (num_ranks + 1) * num_ranks**0.5 * 2.0**-9


def verify(contestants: Sequence[Contestant], setting: Setting) -> dict:
    """Train each for a few steps; raise `Disagreement` unless they agree with the first.

    Returns the largest differences: of losses (relative), of gradient norms (relative), and of the
    updates of all weights (L2 norm of the difference, relative to the first's update).
    """
    before = _weights(contestants[0].model)
    histories = [_train(one, setting) for one in contestants]
    reference = [w - b for w, b in zip(_weights(contestants[0].model), before, strict=True)]
    worst = {"loss": 0.0, "gradient norm": 0.0, "update": 0.0}
    loss_tolerance, tolerance = tolerances(setting.dtype, setting.ranks.num_ranks)
    limits = {"loss": loss_tolerance, "gradient norm": tolerance, "update": tolerance}
    for one, history in zip(contestants[1:], histories[1:], strict=True):
        update = [w - b for w, b in zip(_weights(one.model), before, strict=True)]
        found = {
            "loss": _farthest(history, histories[0], 0),
            "gradient norm": _farthest(history, histories[0], 1),
            "update": _distance(update, reference, setting),
        }
        for what, difference in found.items():
            if not difference <= limits[what]:
                raise Disagreement(
                    f"{one.name} and {contestants[0].name} do not train alike: {what} differs by "
                    f"{difference:.2e}, allowed {limits[what]:.2e}; nothing was timed"
                )
            worst[what] = max(worst[what], difference)
    return {"steps": VERIFIED_STEPS, "differences": worst, "allowed": limits}


def set_eps(optimizer: torch.optim.Optimizer, eps: float) -> None:
    """Give all of an optimizer's groups this eps."""
    for group in optimizer.param_groups:
        group["eps"] = eps


def _compete(name: str, setting: Setting, contestants: list[Contestant], rounds: int) -> dict:
    verified = verify(contestants, setting)
    for one in contestants:
        for _ in range(WARM_UP):
            one.step()
    seconds, work = _take_turns(contestants, setting, rounds)
    peer = contestants[0].name
    rows = []
    for one in contestants:
        times = seconds[one.name]
        ratios = [mine / its for mine, its in zip(times, seconds[peer], strict=True)]
        rows.append(
            {
                "name": one.name,
                "median": statistics.median(times),
                "ratio": statistics.median(times) / statistics.median(seconds[peer]),
                "quartiles": quartiles(ratios),
                "work_ratio": statistics.median(work[one.name]) / statistics.median(work[peer]),
                "seconds": times,
                "processor_seconds": work[one.name],
            }
        )
    return {
        "name": f"{name}, {setting.dtype}",
        "ranks": setting.ranks.num_ranks,
        "dtype": setting.dtype,
        "device": str(setting.ranks.device.type),
        "threads": torch.get_num_threads(),
        "verified": verified,
        "peer": peer,
        "contestants": rows,
    }


def _take_turns(
    contestants: list[Contestant], setting: Setting, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of each contestant's steps the seconds on the slowest rank and the processors' on all ranks.

    The order turns round each round.
    """
    seconds = {one.name: [] for one in contestants}
    work = {one.name: [] for one in contestants}
    for number in range(rounds):
        for one in contestants[:: -1 if number % 2 else 1]:
            dist.barrier()
            started, idle = time.perf_counter(), time.process_time()
            one.step()
            if setting.ranks.device.type == "cuda":
                torch.cuda.synchronize()
            taken, busy = time.perf_counter() - started, time.process_time() - idle
            seconds[one.name].append(setting.largest(taken))
            work[one.name] += setting.ranks.sum(busy)
    return seconds, work


def _train(one: Contestant, setting: Setting) -> list[tuple[float, float]]:
    """(loss over all ranks, gradient norm) of the first steps, with Adam made smooth."""
    set_eps(one.optimizer, SMOOTH_EPS)
    history = []
    for _ in range(VERIFIED_STEPS):
        loss, norm = one.step()
        mean = loss if one.global_loss else setting.ranks.sum(loss)[0] / setting.ranks.num_ranks
        history.append((mean, whole(norm)))
    set_eps(one.optimizer, EPS)
    return history


def _weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's shards, in the order of their names, in fp64."""
    named = sorted(model.named_parameters())
    local = (p.to_local() if isinstance(p, DTensor) else p for _, p in named)
    return [weight.detach().double() for weight in local]


def _farthest(mine: list[tuple], theirs: list[tuple], column: int) -> float:
    pairs = zip(mine, theirs, strict=True)
    return max(abs(a[column] - b[column]) / abs(b[column]) for a, b in pairs)


def _distance(mine: list[torch.Tensor], theirs: list[torch.Tensor], setting: Setting) -> float:
    apart = sum((a - b).square().sum().item() for a, b in zip(mine, theirs, strict=True))
    length = sum(b.square().sum().item() for b in theirs)
    apart, length = setting.ranks.sum(apart, length)
    return (apart / length) ** 0.5
