"""Bytes that a node sends per step on clusters larger than any at hand.

By default the 18-billion-parameter GPT of the ZeRO++ tutorial on 24 nodes of 16 ranks. A rank runs
its step in PyTorch's fake process group, on tensors without memory, and its ledger counts what it
would have sent. Two ranks of a node are counted: the last one, whose neighbour in a ring is on the
next node, and another one, which stands for the rest. The table also shows the formula's bytes and
those of plain FSDP2. All numbers are in M, the bytes of the model in 16 bit, per step and direction
of a node.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping

import torch

from benchmarks.cluster.configurations import zero_config
from benchmarks.cluster.fake_ranks import counted_step, fake_rank
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.table import Column, table
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.arguments import parse
from zeropp.sharding.forecast import node_bytes

SHAPE = {
    "nodes": 24, "ranks_per_node": 16, "micro_batches": 1, "layers": 40, "hidden": 6144,
    "heads": 32, "seq": 512, "vocab": 50257,
}  # fmt: skip
COMPONENTS = {"ZeRO-3": "zero3", "qwZ": "qwz", "hpZ": "hpz", "qgZ": "qgz", "all three": "zeropp"}
PURPOSES = {
    "weights_forward": "weights, forward",
    "weights_backward": "weights, backward",
    "gradients": "gradients",
}


def measure(options: Options, result: dict) -> None:
    """Count every configuration."""
    result["shape"] = {name: getattr(options, name) for name in SHAPE}
    started = time.monotonic()
    result["rows"] = [count(name, options) for name in options.only]
    result["parameters"] = result["rows"][0]["parameters"]
    result["seconds"] = round(time.monotonic() - started, 1)


def count(name: str, options: Options) -> dict:
    """The row of one configuration: bytes a node sends by (purpose, hop), in units of M."""
    flags = (
        f"--num-layers {options.layers} --hidden-size {options.hidden} "
        f"--num-attention-heads {options.heads} --seq-length {options.seq} "
        f"--max-position-embeddings {options.seq} --hidden-dropout 0 --attention-dropout 0 "
        "--micro-batch-size 1 --train-iters 1 --mock-data"
    )
    model = parse(flags.split(), world_size=1).model
    config = zero_config(COMPONENTS[name], options.ranks_per_node)
    tokens = torch.zeros(1, options.seq, dtype=torch.int64)
    last = options.ranks_per_node - 1
    counted: Counter[tuple[str, str]] = Counter()
    for rank, similar_ranks in {0: last, last: 1}.items():
        with fake_rank(rank, options.nodes * options.ranks_per_node) as mesh:
            sharding = counted_step(
                lambda: GPT(model, options.vocab),
                lambda gpt: gpt(tokens, tokens),
                mesh,
                config,
                options.micro_batches,
            )
        for key, num_bytes in sharding.traffic.take().items():
            counted[key] += similar_ranks * num_bytes
    parameters = sharding.model.num_parameters()
    return {
        "name": name,
        "parameters": parameters,
        "ledger": in_m(counted, parameters),
        "forecast": in_m(node_bytes(sharding.plan, options.micro_batches), parameters),
        "plain": in_m(node_bytes(sharding.plan.plain(), options.micro_batches), parameters),
    }


def in_m(sent: Mapping[tuple[str, str], float], parameters: int) -> dict[str, float]:
    """Units of M by "purpose hop", and the sums over purposes by hop."""
    cells = {
        f"{purpose} {hop}": num_bytes / (2 * parameters)
        for (purpose, hop), num_bytes in sent.items()
    }
    for hop in ("across_nodes", "in_node"):
        cells[hop] = sum(cells[f"{purpose} {hop}"] for purpose in PURPOSES)
    return cells


def show(result: Mapping) -> str:
    """Markdown: across nodes by purpose, the sum, the formula's, and within the node."""
    shape, parameters = result["shape"], result["parameters"]
    title = (
        f"{parameters / 1e9:.2f} billion parameters, M = {2 * parameters / 1e9:.1f} GB; "
        f"{shape['nodes']} nodes of {shape['ranks_per_node']} ranks; "
        f"{shape['micro_batches']} micro-batch(es) per step."
    )
    plain = result["rows"][0]["plain"]
    rows = [{"name": "plain FSDP2 (formula)", "ledger": plain, "forecast": plain}]
    counted = table(
        [*rows, *result["rows"]],
        Column("", "name"),
        *(
            Column(title, lambda row, p=purpose: row["ledger"][f"{p} across_nodes"], ".4f")
            for purpose, title in PURPOSES.items()
        ),
        Column("across nodes", lambda row: row["ledger"]["across_nodes"], ".4f"),
        Column("by formula", lambda row: row["forecast"]["across_nodes"], ".4f"),
        Column("within the node", lambda row: row["ledger"]["in_node"], ".4f"),
    )
    return f"{title}\n\n{counted}"


OPTIONS = (
    *(Flag(f"--{name.replace('_', '-')}", value) for name, value in SHAPE.items()),
    Flag("--only", tuple(COMPONENTS), "some of the rows", choices=tuple(COMPONENTS)),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
