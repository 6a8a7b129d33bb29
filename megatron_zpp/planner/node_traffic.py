"""The bytes that the nodes of a planned run send in a step, on every axis."""

from collections import Counter
from collections.abc import Iterator

from megatron_zpp.model.execution import Execution
from megatron_zpp.planner.parts.planned_run import Places, PlannedRun
from megatron_zpp.planner.replicas import PlannedReplicas
from megatron_zpp.recipe.activation_forecast import Forecast
from megatron_zpp.settings.capability_flags import CAPABILITIES
from zeropp.optim import OPTIMIZER
from zeropp.settings import declared
from zeropp.sharding import node_bytes
from zeropp.wire import AXES, HOPS, PURPOSES, Message, sum_of

Sent = dict[tuple[str, str], float]  # (purpose or axis, hop) -> bytes


def mean_of_nodes(runs: Places, replicas: PlannedReplicas | None = None) -> Sent:
    """Return the mean over nodes of what they send; each run stands for so many places."""
    total: Counter[tuple[str, str]] = Counter()
    for run, count in runs:
        outer = {} if replicas is None else replicas.sent_by_node(run)
        for key, sent in (node_of(run) | outer).items():
            total[key] += count * sent
    num_places = sum(count for _, count in runs)
    return {key: sent / num_places for key, sent in total.items()}


def node_of(run: PlannedRun) -> Sent:
    """Return what a node of ranks at this place of a pipeline sends in a step."""
    sent: Counter[tuple[str, str]] = Counter()
    if run.num_ranks > 1:
        sent.update(node_bytes(run.plan, run.num_micro_batches, typical=True))
    forecast = axis_forecast(run)
    for stage in run.stages:
        for message in forecast.messages(stage):
            _add(sent, run, message, run.num_micro_batches)
    for message in gradient_messages(run):
        _add(sent, run, message, 1)
    names = [*PURPOSES, *AXES, *declared("PURPOSES", CAPABILITIES)]
    for each in run.capabilities:
        for message in each.messages(run.num_micro_batches):
            _add(sent, run, message, 1)
    if run.optimizer is not None:
        sent.update(run.optimizer.sent_by_node)
        names.insert(len(PURPOSES), OPTIMIZER)
    return {(name, hop): sent[name, hop] for name in names for hop in HOPS}


def axis_forecast(run: PlannedRun) -> Forecast:
    """Return the forecast of what is sent beside weights and gradients."""
    model, execution = run.model.split(run.ranks), Execution(run.config.recompute)
    size = run.config.batch.micro_batch_size
    return Forecast(model, run.ranks, size, run.compute_dtype, execution)


def gradient_messages(run: PlannedRun) -> Iterator[Message]:
    """Return what is sent once per step: gradients that ranks of an axis have parts of."""
    model = run.model
    partial = model.partial(run.ranks) if run.ranks.tensor_size > 1 else set()
    tokens = model.split(run.ranks).tokens.weight
    is_tied = run.ranks.pipeline_size > 1 and model.whole.head is None and tokens.requires_grad
    tied = {tokens} if is_tied else set()  # with its gradient at both ends
    return axis_forecast(run).gradients(run.shard_sizes(partial), run.shard_sizes(tied))


def _add(sent: Counter, run: PlannedRun, message: Message, times: int) -> None:
    """Add what all ranks of a node send in a message, each in its own group of ranks."""
    share = run.ranks.nodes.ranks_per_node / message.group.size
    for key, num_bytes in sum_of(map(message.of, message.group.members)).items():
        sent[key] += times * share * num_bytes
