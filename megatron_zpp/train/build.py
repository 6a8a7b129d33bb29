"""Builds a run from its configuration: data, model, optimizer, checkpoint, log."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from megatron_zpp.checkpoint.iteration_folders import checkpoint_folder
from megatron_zpp.checkpoint.open_model import OpenModel
from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.monitor.communication import CommunicationMeter, size
from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.expected_step import StepWatch, read_expected_step
from megatron_zpp.monitor.log_lines import MegatronLines, ShortLines
from megatron_zpp.monitor.matmul_rate import MatmulRate, matmul_rate, warn_if_float32_is_faster
from megatron_zpp.monitor.metrics import Metrics
from megatron_zpp.monitor.report.run_record import RunFacts
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.pipeline_schedule import waiting_share
from megatron_zpp.recipe.capability import capabilities_of, settled
from megatron_zpp.recipe.model import build_model, build_optimizer, find_apex
from megatron_zpp.recipe.pipeline import Pipeline
from megatron_zpp.settings.config import Config, PrecisionConfig
from megatron_zpp.train.inputs import TRAIN, open_inputs
from megatron_zpp.train.resume import load, saved_run, with_source
from megatron_zpp.train.run import Run
from megatron_zpp.train.stop import Stopping
from megatron_zpp.train.trainer import Counters, OneStage, Trainer
from zeropp import LossScaler, ZeroConfig, __version__
from zeropp.checkpoint import AsyncWriter, FolderLock
from zeropp.optim import sharded, state_numbers_per_weight
from zeropp.ranks import fail_together
from zeropp.sharding import find_nodes
from zeropp.wire import require_fit

FP32_BYTES = 4

log = logging.getLogger("megatron_zpp")


def build_run(
    requested: Config,  # of `parse`, without what the data and the pretrained model determine
    ranks: Ranks,
    console: Console,
    stopping: Stopping,
    open_model: OpenModel,
    save_lock: FolderLock | None = None,
) -> Run:
    """Do all that precedes the first iteration, on all ranks; InputError for what does not fit."""
    check_nodes(requested.zero, ranks)
    source = saved_run(requested.checkpoint, ranks)
    checkpoint = with_source(requested.checkpoint, source, ranks)
    requested = replace(requested, checkpoint=checkpoint)
    config, tokenizer, batches, pretrained = open_inputs(requested, ranks, open_model)
    fill, save = pretrained and pretrained.fill, config.checkpoint.save
    trainer = build_trainer(config, ranks, tokenizer.vocab_size, fill)
    run = Run(
        console=console,
        tokenizer=tokenizer,
        batches=batches,
        trainer=trainer,
        checkpoints=checkpoint_folder(Path(save), save_lock) if save else None,
        writer=AsyncWriter() if save and config.checkpoint.async_save else None,
        metrics=build_metrics(trainer, console, tokenizer.vocab_size),
        stopping=stopping,
        step_watch=open_step_watch(trainer),
    )
    load(run, source)
    with fail_together():
        run.open_writers()
    console.table("Megatron-Z++", rows := summary(run))
    run.metrics.use_facts(partial(run_facts, run, rows))
    return run


def build_trainer(
    config: Config, ranks: Ranks, vocab_size: int, fill: Callable[[torch.nn.Module], None] | None
) -> Trainer:
    """Build the model, whose weights `fill` writes or which are drawn, and what trains it."""
    apex, capabilities = find_apex(ranks.device), capabilities_of(config, ranks)
    sharding = build_model(config, vocab_size, ranks, apex, fill, capabilities)
    warn_if_float32_is_faster(ranks.device, sharding.compute_dtype)
    optimizer = build_optimizer(sharding, config.optimizer, ranks.device, apex, capabilities)
    for each in capabilities:
        each.sharding, each.optimizer = sharding, optimizer
    ranks.replicas.bind(config.zero, sharding, optimizer)
    passes, size = sharding.model, config.batch.micro_batch_size
    if not isinstance(passes, Pipeline):
        passes = OneStage(sharding=sharding, main_thread=ranks.main_thread)
    return Trainer(
        config=config,
        ranks=ranks,
        sharding=sharding,
        optimizer=optimizer,
        scaler=build_scaler(config.precision),
        capabilities=capabilities,
        passes=passes,
        schedules=config.schedules,
        counters=Counters(),
        communication=CommunicationMeter(sharding, ranks, size, optimizer, capabilities),
    )


def build_scaler(precision: PrecisionConfig) -> LossScaler | None:
    """The loss scaler of fp16; nothing else needs one."""
    if not precision.fp16:
        return None
    fixed = precision.loss_scale
    return LossScaler(
        scale=precision.initial_loss_scale if fixed is None else fixed,
        min_scale=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        dynamic=fixed is None,
    )


def build_metrics(trainer: Trainer, console: Console, vocab_size: int) -> Metrics:
    """Build the log, and measure with what rate a device multiplies matrices if that is logged."""
    config, ranks, rate = trainer.config, trainer.ranks, None
    if config.log.log_throughput:
        rate = matmul_rate(ranks.device, getattr(torch, config.precision.format))
    is_short = {"auto": console.is_terminal, "short": True, "megatron": False}
    lines = ShortLines if is_short[config.log.log_format] else MegatronLines
    return Metrics(
        config.log,
        console,
        lines(throughput=config.log.log_throughput),
        world_size=ranks.world_size,
        flops=TokenFlops.of(config.model, config.recompute, vocab_size),
        rate=rate,
    )


def open_step_watch(trainer: Trainer) -> StepWatch | None:
    """What compares steps with the plan in `--plan-file`; InputError if it is not of this run."""
    config, ranks = trainer.config, trainer.ranks
    if config.log.plan_file is None:
        return None
    with fail_together():
        parallel = settled(config.parallel, trainer.capabilities, ranks.nodes)
        key = replace(config, parallel=parallel).step_key(ranks.world_size)
        return StepWatch(read_expected_step(config.log.plan_file, key))


def summary(run: Run) -> list[tuple[str, object]]:
    """Rows of the table printed before training, as (name, value)."""
    config, trainer, ranks, model = run.config, run.trainer, run.ranks, run.config.model
    sharding, batch = trainer.sharding, trainer.schedules.batch_size.final
    micro_batches = batch // (config.batch.micro_batch_size * ranks.planned_parts)
    shape = (
        f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} "
        f"heads, vocabulary {run.tokenizer.vocab_size:,}"
    )
    share = "ranks" if ranks.data_parallel_size == ranks.num_ranks else "replicas"
    threads = torch.get_num_threads()
    optimizer = config.optimizer.optimizer.title()
    compute_dtype = str(sharding.compute_dtype).removeprefix("torch.")
    sources = config.data.data_path or config.data.train_data_path or ("made-up samples",)
    return [
        ("model", f"{sharding.model.num_parameters():,} parameters\n{shape}"),
        *(row for each in trainer.capabilities for row in each.model_rows(sharding.model)),
        ("data", " ".join(sources)),
        (
            "batch",
            f"{batch} samples of {model.seq_length} tokens, {micro_batches} micro-"
            f"batch{'es' * (micro_batches > 1)} of {config.batch.micro_batch_size} on each of "
            f"{ranks.num_parts} {share}",
        ),
        ("length", length_of(run)),
        ("checkpoints", checkpoints_of(run)),
        ("precision", f"{compute_dtype}, weights and {optimizer} in float32"),
        ("device", f"{ranks.device}, {threads} thread{'s' * (threads > 1)}"),
        *(matmul_rate_rows(run.metrics.matmul_rate) if config.log.log_throughput else []),
        *(parallel_rows(ranks) if ranks.data_parallel_size < ranks.num_ranks else []),
        *(pipeline_rows(run, micro_batches) if ranks.pipeline_size > 1 else []),
        *([("plan", run.step_watch.expected)] if run.step_watch else []),
        ("ZeRO stage", sharding.stage),
        *(row for each in trainer.capabilities for row in each.rows()),
        *communication_rows(run, micro_batches),
    ]


def communication_rows(run: Run, micro_batches: int) -> Iterator[tuple[str, str]]:
    """Rows that say which nodes there are, what they exchange, and how many bytes that takes."""
    expected = run.trainer.communication.expected_on_node(micro_batches)
    yield from run.ranks.replicas.rows(run.ranks)
    for name, text in run.trainer.sharding.describe(micro_batches, expected):
        if not run.ranks.replicas.independent or name != "nodes":
            yield name, text


def length_of(run: Run) -> str:
    """Iterations and tokens of the whole run, and the epochs of a dataset that counts them."""
    length, dataset = run.trainer.schedules.length, run.batches.datasets[TRAIN]
    tokens = length.samples * run.config.model.seq_length
    text = f"{length.iterations:,} iterations, {tokens:,} tokens"
    if not hasattr(dataset, "epochs"):
        return text
    epochs = [f"{each:.2g}" for each in sorted(dataset.epochs(length.samples))]
    return f"{text}, {' to '.join(dict.fromkeys((epochs[0], epochs[-1])))} epochs of the data"


def checkpoints_of(run: Run) -> str:
    """When checkpoints are saved, and how large they are, without headers and padding."""
    options = run.config.checkpoint
    first = run.next_save(run.trainer.counters.iteration)
    if first is None:
        return "none: --save FOLDER saves them"
    trained = run.trainer.sharding.model.num_parameters(trained_only=True)
    frozen = run.trainer.sharding.model.num_parameters() - trained
    moments = 0 if options.no_save_optim else state_numbers_per_weight(run.trainer.optimizer)
    num_bytes = FP32_BYTES * trained * (1 + moments)
    if run.config.zero.placement.frozen_bits is None:
        num_bytes += FP32_BYTES * frozen
    if run.config.zero.updates_copies:
        num_bytes += trained  # the codes that the nodes have
    is_last = first == run.trainer.schedules.length.iterations
    text = f"about {size(num_bytes)} each, the first after iteration {first:,}"
    text += ", the last" if is_last else f", then every {options.save_interval:,}"
    kept = options.keep_checkpoints
    return text + (f";\nthe newest {kept} are kept" if kept and not is_last else "")


def run_facts(run: Run, rows: Sequence[tuple[str, object]]) -> RunFacts:
    """What the report says of a run beside its curves; `rows` are those of `summary`."""
    expected, optimizer = run.trainer.communication.forecast, run.trainer.optimizer
    return RunFacts(
        command=sys.argv,
        version=__version__,
        train_iters=run.trainer.schedules.length.iterations,
        zero_stage=run.trainer.sharding.stage,
        table=[(name, str(value)) for name, value in rows],
        settings=run.config.to_dict(),
        forecast={f"{purpose}_{hop}": number for (purpose, hop), number in expected.items()},
        expected_step=asdict(run.step_watch.expected) if run.step_watch else None,
        optimizer_flops=sharded(optimizer).flops(),
    )


def check_nodes(zero: ZeroConfig, ranks: Ranks) -> None:
    """Raise InputError for nodes that do not fit the JSON.

    Logs a line if ranks that exchange activations in every layer are in different nodes, and one if
    settings are for messages between replicas that send none in a step.
    """
    nodes = find_nodes(ranks.mesh, zero, ranks.data)
    require_fit(zero, nodes)
    if nodes.count == 1 and ranks.global_rank == 0:
        for line in ranks.replicas.notices(zero):
            log.info(line)
    per_node = nodes.ranks_per_node * nodes.parts
    if ranks.rank == 0 and per_node % ranks.tensor_size:
        log.warning(
            f"--tensor-model-parallel-size {ranks.tensor_size} with {per_node} ranks per node: "
            "the tensor-parallel messages of every layer cross nodes; with a divisor of "
            f"{per_node}, they stay within a node"
        )


def parallel_rows(ranks: Ranks) -> list[tuple[str, str]]:
    """A row that says how ranks share the work that do not only share the samples."""
    parts = [f"{ranks.data_parallel_size} replica{'s' * (ranks.data_parallel_size > 1)}"]
    for what, members in ranks.sharing().items():
        in_node = all(ranks.nodes.same(ranks.rank, member) for member in members)
        where = "in a node" if in_node else "across nodes"
        parts.append(f"{len(members)} ranks share {what}, {where}")
    return [("ranks", "\n".join(parts))]


def pipeline_rows(run: Run, micro_batches: int) -> list[tuple[str, str]]:
    """A row with the stages of a pipeline, and how long its ranks wait for each other."""
    ranks = run.ranks.pipeline_size
    stages = run.config.parallel.stages(run.config.model.num_layers)
    counts = list(map(len, stages))
    layers = f"{counts[0]}" if len(set(counts)) == 1 else ", ".join(map(str, counts))
    waiting = waiting_share(ranks, micro_batches, len(stages) // ranks)
    if micro_batches < ranks and run.ranks.rank == 0:
        log.warning(
            f"{micro_batches} micro-batches on {ranks} pipeline ranks: each rank waits for others "
            f"in {waiting:.0%} of a step; use more micro-batches, or fewer stages"
        )
    return [
        (
            "pipeline",
            f"{len(stages)} stages of {layers} layers; a rank waits in {waiting:.0%} of a step",
        )
    ]


def matmul_rate_rows(rate: MatmulRate) -> list[tuple[str, str]]:
    """A row with the measured rate of matrix products."""
    text = f"{rate.measured / 1e12:.3g} TFLOP/s, measured"
    if rate.peak is not None:
        text += f"; {rate.peak / 1e12:.4g} by the data sheet: MFU is a share of it"
    return [("matrix products", text)]
