"""`--rehearse-ranks N`: the memory and the time of one rank of N, whose peers are planned.

Its process groups are PyTorch's fake ones. What it receives are copies of what it sends.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

import torch

from megatron_zpp.planner.activations import LiveBytes
from megatron_zpp.planner.run_forecast import RunForecast, rank_memory
from megatron_zpp.planner.timing.hardware import find_cluster, hardware_table

if TYPE_CHECKING:
    from megatron_zpp.train.run import Run

WARM_UP, STEPS = 2, 5  # the first steps allocate the optimizer's state, and compile
MIB = 2**20


def rows(steps: Iterator["Run"], device: torch.device) -> list[tuple[str, str]]:
    """Take steps, of which each yields the run; return what they take beside what is foretold."""
    is_cpu, seconds, run = device.type == "cpu", [], None
    if not is_cpu:
        torch.cuda.reset_peak_memory_stats()
    with LiveBytes() if is_cpu else nullcontext() as live:
        started = time.perf_counter()
        for run in islice(steps, WARM_UP + STEPS):
            if run.ranks.asynchronous:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
    peak = live.peak if is_cpu else torch.cuda.max_memory_allocated()
    nodes, vocab_size = run.ranks.nodes, run.tokenizer.vocab_size
    forecast = RunForecast.of(run.config, vocab_size, nodes, is_cpu=is_cpu)
    foretold = sum(rank_memory(forecast.first)[is_cpu].values())
    return [
        ("ranks", f"the first of {nodes.num_ranks}; the others are planned"),
        ("real", "this rank's samples, kernels and optimizer, and the sizes of messages"),
        ("not real", "links: a message takes as long as a copy of it;"),
        ("", "what others send: it is as this rank's own, so that losses mean nothing"),
        ("memory", f"{peak / MIB:.2f} MiB at the peak; --dry-run: {foretold / MIB:.2f} MiB"),
        ("step", f"{statistics.median(seconds[WARM_UP:] or seconds):.4f} s, with copies"),
        ("planner", _seconds_without_messages(forecast, is_cpu=is_cpu)),
    ]


def _seconds_without_messages(forecast: RunForecast, *, is_cpu: bool) -> str:
    name = "CPU" if is_cpu else torch.cuda.get_device_name()
    gpus = hardware_table()["gpus"].items()
    known = next((gpu for gpu, entry in gpus if entry["cuda_name"] == name), None)
    if known is None:
        return f"its table has no {name}"
    step = forecast.time(find_cluster(gpu=known, gpus_per_node=1))
    return f"{step.computing + step.kernels:.4f} s without messages, on {known}"
