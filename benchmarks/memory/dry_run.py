"""The memory that `--dry-run` predicts beside the peak of real steps on the CPU, as a table.

The bytes of all live tensors are measured after every op, on the rank that has most.
"""

import sys
from types import MappingProxyType

import torch
import torch.distributed as dist

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.pretrain_run import cpu_ranks
from benchmarks.shared.rank_processes import NO_GPUS, run_on_ranks
from benchmarks.shared.table import Column, table
from benchmarks.shared.training_setup import CPU, joined_ranks, largest_of_ranks
from benchmarks.shared.zero_json import json_flag
from megatron_zpp.capabilities.experts.routing_record import routing_records
from megatron_zpp.data.loader import Batch
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.planner.activations import LiveBytes
from megatron_zpp.planner.run_forecast import RunForecast
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.recipe.model import build_model, build_optimizer
from megatron_zpp.recipe.pipeline import Pipeline
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from megatron_zpp.train.trainer import OneStage
from zeropp import optimizer_step
from zeropp.settings import read_toml

VOCABULARY = 1000
MIB = 2**20
MODEL = (
    "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 2 "
)
TABLE = MappingProxyType(read_toml(__package__, "dry_run.toml"))
STEPS = 2  # the first allocates Adam's moments


def predict_and_measure(flags: str) -> tuple[RunForecast | None, int]:
    """The prediction for `flags` on these ranks, which rank 0 makes and returns, and the largest
    peak of any rank in bytes."""
    words = f"--mock-data --lr 1e-3 --eval-iters 0 --train-iters 9 {flags}".split()
    config = parse(words, dist.get_world_size())
    ranks, prediction = cpu_ranks(config), None
    if ranks.rank == 0:
        prediction = RunForecast.of(config, VOCABULARY, ranks.nodes, is_cpu=True)
    with LiveBytes() as live:
        _train(config, ranks)
    return prediction, int(largest_of_ranks(live.peak, CPU))


def _train(config: Config, ranks: Ranks) -> None:
    own, size = capabilities_of(config, ranks), config.batch.micro_batch_size
    micro_batches = config.batch.global_batch_size // (size * ranks.data_parallel_size)
    sharding = build_model(config, VOCABULARY, ranks, apex=None)
    optimizer = build_optimizer(sharding, config.optimizer, CPU, None, own)
    shape = size, config.model.seq_length
    tokens, mask = torch.randint(VOCABULARY, shape), torch.ones(shape)
    batch = Batch(tokens=tokens, labels=tokens, loss_mask=mask, position_ids=None)
    passes: Pipeline | OneStage = OneStage(sharding=sharding, main_thread=ranks.main_thread)
    if isinstance(sharding.model, Pipeline):
        passes = sharding.model
    for _ in range(STEPS):
        samples = ((0, batch) for _ in range(micro_batches))
        routing = routing_records(micro_batches) if config.model.has_experts else None
        passes.forward_backward(samples, [1.0] * micro_batches, lambda *_: None, routing)
        passes.sum_tied_gradients(optimizer)
        del routing
        optimizer_step(optimizer, sharding, clip_grad=1.0)


def measure(options: Options, result: dict) -> None:
    """Run all cases on the ranks."""
    result["rows"] = run_on_ranks(__spec__.name, options.ranks, options.only, variables=NO_GPUS)


def on_rank(only: str) -> list[dict]:
    """A row for each of the cases of `dry_run.toml` that contain a text."""
    rows = []
    joined_ranks()
    texts = TABLE["flags"] | {name: json_flag(each) for name, each in TABLE["jsons"].items()}
    for case in (each for each in TABLE["cases"] if only in each):
        flags = case
        for name, text in texts.items():
            flags = flags.replace(name, text)
        prediction, measured = predict_and_measure(MODEL + flags)
        predicted = None if prediction is None else prediction.host_bytes
        rows.append({"flags": case, "predicted": predicted, "measured": measured})
    return rows


def show(result: dict) -> str:
    """A line for each case."""
    return table(
        result["rows"],
        Column("flags", lambda row: f"`{row['flags']}`"),
        Column("predicted, MiB", "predicted", ".1f", 1 / MIB),
        Column("measured, MiB", "measured", ".1f", 1 / MIB),
        Column(
            "difference", lambda row: round(row["predicted"] / row["measured"] - 1, 3) + 0.0, "+.1%"
        ),
    )


OPTIONS = (
    Flag("--ranks", 4, least=1),
    Flag("--only", "", "cases whose flags contain this, as in cpu-optimizer"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
