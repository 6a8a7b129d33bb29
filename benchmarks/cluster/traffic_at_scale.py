"""Bytes that a node sends per step at a scale nobody has at hand: `python benchmarks/cluster/scale.py`.

By default the ZeRO++ tutorial's 18-billion-parameter GPT on 24 nodes of 16 ranks. A rank makes its
step under PyTorch's fake process group, on tensors without memory; its ledger counts what it would
have sent. The ranks of a node are of two kinds: in a ring the last one's neighbour is on the next
node. One of each kind is counted. Beside the ledger stands the formula, and what plain FSDP2 would
send. All numbers are in M, the bytes of the model in 16 bit, per step and direction of a node.
"""

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.cluster.fake_ranks import counted_step, one_rank
from benchmarks.shared.surroundings import surroundings
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.arguments import parse
from zeropp import ZeroConfig

PARTS = {
    "ZeRO-3": (),
    "qwZ": ("qwz",),
    "hpZ": ("hpz",),
    "qgZ": ("qgz",),
    "all three": ("qwz", "hpz", "qgz"),
}
PURPOSES = ("weights_forward", "weights_backward", "gradients")


def main(arguments: Sequence[str] | None = None) -> None:
    """Count every configuration and print the table; with --json, write it too."""
    given = parsed(arguments)
    facts = surroundings()
    began = time.monotonic()
    rows = [count(name, given) for name in given.only or PARTS]
    results = {
        "command": shlex.join(["python", "benchmarks/cluster/scale.py", *(arguments or sys.argv[1:])]),
        "shape": {name: getattr(given, name) for name in SHAPE},
        "parameters": rows[0]["parameters"], "seconds": round(time.monotonic() - began, 1),
        "rows": rows, **facts,
    }
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


SHAPE = {
    "nodes": 24, "ranks_per_node": 16, "micro_batches": 1, "layers": 40, "hidden": 6144,
    "heads": 32, "seq": 512, "vocab": 50257,
}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SHAPE.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value, help=str(value))
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="some of the rows")
    parser.add_argument("--json", type=Path, help="a file to write")
    return parser.parse_args(arguments)


def config_of(parts: Sequence[str], ranks_per_node: int) -> ZeroConfig:
    keys = {
        "qwz": {"zero_quantized_weights": True},
        "hpz": {"zero_hpz_partition_size": ranks_per_node},
        "qgz": {"zero_quantized_gradients": True},
    }
    zero = {"stage": 3}
    for part in parts:
        zero |= keys[part]
    node = {"ranks_per_node": ranks_per_node}
    return ZeroConfig.from_json(
        {"bf16": {"enabled": True}, "zero_optimization": zero, "zeropp": node}
    )


def count(name: str, given: argparse.Namespace) -> dict:
    """One configuration: bytes a node sends by (purpose, hop), from its ranks' ledgers."""
    model = parse(
        f"--num-layers {given.layers} --hidden-size {given.hidden} "
        f"--num-attention-heads {given.heads} --seq-length {given.seq} "
        f"--max-position-embeddings {given.seq} --hidden-dropout 0 --attention-dropout 0 "
        "--micro-batch-size 1 --train-iters 1 --mock-data".split(), world_size=1
    ).model
    config = config_of(PARTS[name], given.ranks_per_node)
    tokens = torch.zeros(1, given.seq, dtype=torch.int64)
    counted: Counter[tuple[str, str]] = Counter()
    last = given.ranks_per_node - 1
    for rank, alike in {0: last, last: 1}.items():
        with one_rank(rank, given.nodes * given.ranks_per_node) as mesh:
            sharding = counted_step(
                lambda: GPT(model, given.vocab),
                lambda gpt: gpt(tokens, tokens),
                mesh, config, given.micro_batches,
            )  # fmt: skip
        for key, num_bytes in sharding.traffic.take().items():
            counted[key] += alike * num_bytes
    parameters = sharding.model.num_parameters()
    return {
        "name": name, "parameters": parameters,
        "ledger": in_m(counted, parameters),
        "forecast": in_m(sharding.forecast.node(given.micro_batches), parameters),
        "plain": in_m(sharding.forecast.plain().node(given.micro_batches), parameters),
    }  # fmt: skip


def in_m(sent: Mapping[tuple[str, str], float], parameters: int) -> dict[str, float]:
    """Units of M by "purpose hop", and the sums over purposes by hop."""
    cells = {f"{purpose} {hop}": n / (2 * parameters) for (purpose, hop), n in sent.items()}
    for hop in ("across_nodes", "in_node"):
        cells[hop] = sum(cells[f"{purpose} {hop}"] for purpose in PURPOSES)
    return cells


def table(results: Mapping) -> str:
    """Markdown: across nodes by purpose, the sum, the formula's, and within the node."""
    shape = results["shape"]
    lines = [
        f"{results['parameters'] / 1e9:.2f} billion parameters, M = "
        f"{2 * results['parameters'] / 1e9:.1f} GB; {shape['nodes']} nodes of "
        f"{shape['ranks_per_node']} ranks; {shape['micro_batches']} micro-batch(es) per step.",
        "",
        "| | weights, forward | weights, backward | gradients | across nodes | by formula "
        "| within the node |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = results["rows"][0]["plain"]
    lines.append(line("plain FSDP2 (formula)", plain, plain))
    lines += [line(row["name"], row["ledger"], row["forecast"]) for row in results["rows"]]
    return "\n".join(lines)


def line(name: str, cells: Mapping[str, float], formula: Mapping[str, float]) -> str:
    across = [cells[f"{purpose} across_nodes"] for purpose in PURPOSES]
    numbers = [*across, cells["across_nodes"], formula["across_nodes"], cells["in_node"]]
    return f"| {name} | " + " | ".join(f"{number:.4f}" for number in numbers) + " |"


if __name__ == "__main__":
    main()
