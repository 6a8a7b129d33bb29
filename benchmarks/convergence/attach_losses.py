"""What `zeropp.attach` does to the losses of five trainers, and to the bytes between nodes.

Each trainer trains a small Llama twice on the text of Python's standard library, byte by byte, on
four ranks as two nodes of two: as it does by itself, and with qwZ, hpZ and qgZ attached. Losses are
means over the last tenth of the steps. Bytes between nodes are those of the ledger, of all ranks
and for a step, beside the formula for plain FSDP2. benchmarks.cluster.cluster counts them at the
interfaces of an emulated cluster.
"""

import statistics
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.byte_text import ByteText
from benchmarks.shared.rank_processes import run_on_ranks
from benchmarks.shared.table import Column, table
from benchmarks.shared.training_setup import CPU
from benchmarks.shared.zero_json import zero_json
from zeropp.ranks.process_group import start_process_group
from zeropp.ranks.topology import Environment

RANKS, RANKS_PER_NODE = 4, 2
NAMES = ("FSDP2", "transformers", "TRL", "Lightning", "torchtitan")


def measure(options: Options, result: dict) -> None:
    """Compare all trainers."""
    result |= {"steps": options.steps, "rows": []}
    for name in options.trainers:
        arguments = __spec__.name, RANKS, name, options.steps
        result["rows"].append(run_on_ranks(*arguments, ranks_per_node=RANKS_PER_NODE))


def on_rank(name: str, steps: int) -> dict:
    """Train with one trainer, plainly and attached, as one of the ranks."""
    from benchmarks.convergence.attached_trainers import LENGTH, SAMPLES, TRAINERS

    start_process_group(Environment.read(), CPU, timedelta(minutes=10))
    text = ByteText(steps * RANKS * SAMPLES, LENGTH - 1)
    tokens = torch.stack([torch.from_numpy(sample["tokens"]) for sample in text])
    tokens = tokens.view(steps, RANKS, SAMPLES, LENGTH)
    config = zero_json("zeropp", RANKS_PER_NODE)
    with tempfile.TemporaryDirectory() as folder:
        plain, _ = TRAINERS[name](tokens, None, Path(folder))
        losses, attached = TRAINERS[name](tokens, config, Path(folder))
    last = max(1, steps // 10)
    return {
        "trainer": name,
        "loss": statistics.mean(plain[-last:]),
        "attached": statistics.mean(losses[-last:]),
        "sent": across_nodes(attached.traffic.sent) / steps,
        "plain": across_nodes(attached.plain_traffic()),
        "plain_of_4": across_nodes(attached.plain_traffic(4)),
        "forecast_of_4": across_nodes(attached.expected_traffic(4)),
    }


def across_nodes(sent: dict[tuple[str, str], float]) -> float:
    """Return the bytes that all ranks send to other nodes, by this rank's ledger."""
    own = sum(num_bytes for (_, hop), num_bytes in sent.items() if hop == "across_nodes")
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def show(result: dict) -> str:
    """A line for each trainer."""
    return table(
        result["rows"],
        Column("trainer", "trainer"),
        Column("loss", "loss", ".4f"),
        Column("attached", "attached", ".4f"),
        Column("differs by", lambda row: row["attached"] / row["loss"] - 1, "+.2%"),
        Column("MB between nodes", "sent", ".3f", 1e-6),
        Column("plain FSDP2, x", lambda row: row["plain"] / row["sent"], ".1f"),
    )


OPTIONS = (Flag("--steps", 200, least=1), Flag("--trainers", NAMES, choices=NAMES))
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
