"""`--dry-run`: print the memory that a run needs and whether it fits, without starting it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from megatron_zpp.checkpoint.open_model import OpenModel
from megatron_zpp.checkpoint.pretrained_model import with_initial_model
from megatron_zpp.data.text_source import resolve_vocab_size
from megatron_zpp.monitor.communication import COUNTS, size
from megatron_zpp.monitor.console import Console
from megatron_zpp.planner import run_forecast as kinds
from megatron_zpp.planner.parts.balanced_routing import assumption
from megatron_zpp.planner.run_forecast import RunForecast, rank_memory
from megatron_zpp.planner.state_memory import host_bytes
from megatron_zpp.settings.config import Config
from zeropp.ranks import Environment, free_bytes
from zeropp.sharding import describe
from zeropp.wire import Nodes

DOES_NOT_FIT = 1  # exit status
MIB, GIB = 2**20, 2**30
SHARD_MORE = "more ranks or a higher --zero-stage make each rank's share of the state smaller"
SMALLER_MICRO_BATCH = "a smaller --micro-batch-size, with more micro-batches, needs less memory"
ADVICE = MappingProxyType(
    {
        **dict.fromkeys((kinds.WEIGHTS, kinds.MOMENTS, kinds.GRADIENTS), SHARD_MORE),
        kinds.GATHERED: "--zero-stage 3 gathers one block at a time",
        kinds.COPIES: "a larger zero_hpz_partition_size makes each rank's copy smaller",
        kinds.IN_FLIGHT: "--zero-stage 2 or 3 sums smaller gradients; smaller blocks help, too",
        kinds.ACTIVATIONS: f"--recompute-granularity full keeps least; {SMALLER_MICRO_BATCH}",
        kinds.HEAD: SMALLER_MICRO_BATCH,
        kinds.AGREED: "zeropp.sync_on_host keeps global parameters on the host",
        kinds.OUTER_STATE: "more nodes share out the outer momentum",
        kinds.EXCHANGE: "more ranks in a node make each rank's share of an exchange smaller",
        kinds.SAVED_COPY: "without --async-save, saving needs no copy",
    }
)
OFFLOAD_MORE = "; --cpu-optimizer moves fp32 weights, gradients and moments to the host"
OFFLOAD_LESS = "; offload_optimizer.ratio = {} fits, and the device then needs {:.2f} GiB"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A memory that `ranks` ranks share: the bytes that each needs, and its size, if known."""

    name: str
    needed: int
    size: int | None
    ranks: int = 1

    @property
    def fits(self) -> bool:
        """Return whether the ranks fit; a memory of unknown size is assumed to suffice."""
        return self.size is None or self.needed * self.ranks <= self.size

    def __str__(self) -> str:
        ranks = f" for {self.ranks} ranks" if self.ranks > 1 else ""
        size = "an unknown size" if self.size is None else f"{self.size / GIB:.2f} GiB"
        return f"{self.name}: {self.needed * self.ranks / GIB:.2f} GiB{ranks}, of {size}"


def dry_run(
    requested: Config, environment: Environment, console: Console, open_model: OpenModel
) -> int:
    """Print the memory that a run of `requested` needs; return 1 if it does not fit, else 0.

    `open_model` opens the model of `--pretrained-checkpoint`.

    Raises InputError for invalid settings.
    """
    config, _ = with_initial_model(requested, open_model)
    gpu = find_gpu(environment)
    ranks = config.training.dry_run_ranks, config.zero.zeropp.ranks_per_node
    nodes, ranks_per_machine = _nodes(*ranks, environment)
    vocab_size = resolve_vocab_size(config.data, config.tokenizer)
    run = RunForecast.of(config, vocab_size, nodes, is_cpu=gpu is None)
    memories = _memories(run, gpu, ranks_per_machine)
    too_small = [memory for memory in memories if not memory.fits]
    rows = _rows(run, vocab_size)
    if run.replicas is not None:
        rows = [row for row in rows if row[0] != "nodes"]
        rows.insert(-1, ("nodes", f"{run.replicas}\nwhat is above is of one of them"))
    verdict = "does not fit" if too_small else "fits"
    console.table("Dry run", [*rows, (verdict, "\n".join(map(str, memories)))])
    for memory in too_small:
        advice = _advice(memory, run)
        console.line(f"error: does not fit, {memory}: {advice}")
    return DOES_NOT_FIT if too_small else 0


def find_gpu(environment: Environment) -> tuple[str, int] | None:
    """Return the name and the memory in bytes of this rank's GPU, or None without a GPU."""
    if not torch.cuda.is_available():
        return None
    index = environment.local_rank % torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory


def _nodes(
    num_ranks: int | None, ranks_per_node: int | None, environment: Environment
) -> tuple[Nodes, int]:
    """Return the nodes of the run, and the number of ranks that share this machine's memory."""
    is_launched = environment.launched and not num_ranks
    num_ranks = num_ranks or environment.world_size
    node_size = environment.local_world_size if is_launched else num_ranks
    node_size = ranks_per_node or node_size
    nodes = Nodes.of(range(num_ranks), min(node_size, num_ranks))
    if is_launched:
        return nodes, math.ceil(num_ranks / environment.machines)
    return nodes, nodes.ranks_per_node


def _memories(
    run: RunForecast, gpu: tuple[str, int] | None, ranks_per_machine: int
) -> list[Memory]:
    """Return the memories that the run needs: the GPU, the host or both."""
    host = Memory(name="host", needed=run.host_bytes, size=free_bytes(), ranks=ranks_per_machine)
    if gpu is None:
        return [host]
    name, size = gpu
    device = Memory(name=name, needed=run.device_bytes, size=size)
    return [device, host] if run.host_bytes else [device]


def _rows(run: RunForecast, vocab_size: int) -> list[tuple[str, object]]:
    rank = run.fullest
    config, plan = rank.config, rank.plan
    model = config.model
    shape = (
        f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} "
        f"heads, vocabulary {vocab_size:,}"
    )
    parallel = config.parallel
    num_replicas = plan.num_ranks // parallel.context_parallel_size
    axes = {
        "each matrix": parallel.tensor_model_parallel_size,
        "each sequence": parallel.context_parallel_size,
        "the layers": parallel.pipeline_model_parallel_size,
    }
    shared = [f"{size} ranks share {what}" for what, size in axes.items() if size > 1]
    batch = (
        f"{rank.num_micro_batches} micro-batches of "
        f"{config.batch.micro_batch_size} samples of {model.seq_length} tokens "
        f"on each of {num_replicas} {'replicas' if shared else 'ranks'}"
    )
    memory = {"host": run.host}
    if run.device:
        memory = {"device": run.device, **memory}
    return [
        ("model", f"{shape}: {rank.model.num_parameters:,} parameters"),
        *(row for each in rank.capabilities for row in each.model_rows(rank.model.whole)),
        ("batch", batch),
        *([("axes", "\n".join(shared))] if shared else []),
        ("precision", str(plan.compute_dtype).removeprefix("torch.")),
        ("ZeRO stage", plan.stage),
        *_optimizer_rows(config.optimizer.optimizer, run.optimizer_flops),
        *(row for each in rank.capabilities for row in each.rows()),
        *describe(plan, rank.num_micro_batches, run.sent),
        ("memory", _memory_table(memory) + assumption(model)),
    ]


def _optimizer_rows(optimizer: str, flops: float | None) -> list[tuple[str, str]]:
    if flops is None:
        return []
    text = f"{size(flops, COUNTS)} operations of the busiest rank in a step"
    return [("optimizer", f"{optimizer.title()}: {text}")]


def _memory_table(memory: Mapping[str, Mapping[str, int]]) -> str:
    """Return lines of MiB by kind, with a column for each memory, without kinds that are zero."""
    title = "MiB of a rank, at most"
    lines = [f"{title:<24}" + "".join(f"{name:>14}" for name in memory)]
    for kind in dict.fromkeys((*kinds.KINDS, *(kind for each in memory.values() for kind in each))):
        sizes = [bytes_by_kind.get(kind, 0) for bytes_by_kind in memory.values()]
        if any(sizes):
            lines.append(f"{kind:<24}" + "".join(f"{size / MIB:14.2f}" for size in sizes))
    totals = "".join(
        f"{sum(bytes_by_kind.values()) / MIB:14.2f}" for bytes_by_kind in memory.values()
    )
    return "\n".join([*lines, f"{'total':<24}{totals}"])


def _advice(memory: Memory, run: RunForecast) -> str:
    """Return advice for a memory that is too small, by the largest kind in it."""
    is_host = memory.name == "host"
    bytes_by_kind = run.host if is_host else run.device
    largest_kind = max(bytes_by_kind, key=bytes_by_kind.__getitem__)
    advice = ADVICE.get(largest_kind, SHARD_MORE)
    if memory.ranks > 1:
        advice += "; fewer ranks on a machine share its memory among fewer"
    if not run.device:
        return advice
    if not run.first.config.zero.offloads_optimizer:
        return advice + OFFLOAD_MORE
    return advice + (_fitting_ratio(memory, run) if is_host else "")


def _fitting_ratio(host: Memory, run: RunForecast) -> str:
    """Say which part of the optimizer fits on the host, if any and not all has to be there."""
    rank, zero = run.fullest, run.fullest.config.zero
    optimization, now = zero.zero_optimization, host_bytes(rank).total()
    for percent in () if zero.offloads_weights else range(99, -1, -1):
        offload = replace(optimization.offload_optimizer, ratio=percent / 100)
        kept = replace(zero, zero_optimization=replace(optimization, offload_optimizer=offload))
        other = replace(rank, ranks=replace(rank.ranks, config=replace(rank.config, zero=kept)))
        if replace(host, needed=host.needed - now + host_bytes(other).total()).fits:
            return OFFLOAD_LESS.format(percent / 100, sum(rank_memory(other)[0].values()) / GIB)
    return ""
