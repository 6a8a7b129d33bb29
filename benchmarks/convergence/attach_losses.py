"""What `zeropp.attach` does to the losses of five trainers, and to the bytes between nodes.

    python -m benchmarks.convergence.attach_losses [--steps 200] [--trainers FSDP2 TRL]

Each trainer trains a small Llama twice on the text of Python's standard library, byte by byte, on
four ranks as two nodes of two: as it does by itself, and with qwZ, hpZ and qgZ attached. Losses are
means over the last tenth of the steps. Bytes between nodes are those of the ledger, of all ranks
and for a step, beside the formula for plain FSDP2. benchmarks.cluster.cluster counts them at the
interfaces of an emulated cluster.
"""

import argparse
import statistics
import sys
import sysconfig
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.shared.rank_launch import run_on_ranks, write_answer
from benchmarks.shared.result import begin, benchmark_parser, finish, heading, markdown_table
from zeropp.ranks.process_group import start_process_group
from zeropp.ranks.topology import Environment

RANKS, RANKS_PER_NODE = 4, 2
NAMES = ("FSDP2", "transformers", "TRL", "Lightning", "torchtitan")
CONFIG = {
    "zero_optimization": {
        "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": RANKS_PER_NODE,
        "zero_quantized_gradients": True,
    },
    "zeropp": {"ranks_per_node": RANKS_PER_NODE},
}  # fmt: skip
Sent = dict[tuple[str, str], float]


def main() -> int:
    """Compare all trainers and print the table, or be one of the ranks."""
    options = read_options()
    if options.on_ranks is not None:
        compare(options)
        return 0
    result = begin(__spec__.name)
    result["steps"] = options.steps
    result["rows"] = []
    for name in options.trainers:
        arguments = ["--steps", str(options.steps), "--trainers", name]
        row = run_on_ranks(__spec__.name, RANKS, arguments, ranks_per_node=RANKS_PER_NODE)
        result["rows"].append(row)
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--trainers", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--on-ranks", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace) -> None:
    """Train with one trainer, plainly and attached, as one of the ranks."""
    from benchmarks.convergence.attached_trainers import LENGTH, SAMPLES, TRAINERS

    start_process_group(Environment.read(), torch.device("cpu"), timedelta(minutes=10))
    (name,) = options.trainers
    tokens = shuffled_text(options.steps * RANKS * SAMPLES, LENGTH)
    tokens = tokens.view(options.steps, RANKS, SAMPLES, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        plain, _ = TRAINERS[name](tokens, None, Path(folder))
        losses, attached = TRAINERS[name](tokens, CONFIG, Path(folder))
    last = max(1, options.steps // 10)
    row = {
        "trainer": name,
        "loss": statistics.mean(plain[-last:]),
        "attached": statistics.mean(losses[-last:]),
        "sent": across_nodes(attached.traffic.sent) / options.steps,
        "plain": across_nodes(attached.plain_traffic()),
        "plain_of_4": across_nodes(attached.plain_traffic(4)),
        "forecast_of_4": across_nodes(attached.expected_traffic(4)),
    }
    if dist.get_rank() == 0:
        write_answer(options.on_ranks, row)


def shuffled_text(samples: int, length: int) -> torch.Tensor:
    """Return the first bytes of the standard library, as token ids (samples, length), shuffled."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    tokens = torch.frombuffer(bytearray(content[: samples * length]), dtype=torch.uint8).long()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return tokens.view(samples, length)[order]


def across_nodes(sent: Sent) -> float:
    """Return the bytes that all ranks send to other nodes."""
    total = torch.tensor(sum(n for (_, hop), n in sent.items() if hop == "across_nodes"))
    total = total.double()
    dist.all_reduce(total)
    return total.item()


def show(result: dict) -> None:
    """Print the table."""
    heading(result)
    columns = ("trainer", "loss", "attached", "differs by", "MB between nodes", "plain FSDP2")
    rows = [
        (
            row["trainer"],
            f"{row['loss']:.4f}",
            f"{row['attached']:.4f}",
            f"{row['attached'] / row['loss'] - 1:+.2%}",
            f"{row['sent'] / 1e6:.3f}",
            f"{row['plain'] / row['sent']:.1f} x",
        )
        for row in result["rows"]
    ]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    sys.exit(main())
