"""The bytes that the nodes of a planned run send in a step, on every axis."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from megatron_zpp.planner.parts.planned_local_steps import PlannedLocalSteps
from megatron_zpp.planner.parts.planned_run import Places, PlannedRun
from megatron_zpp.recipe.activation_forecast import Forecast
from megatron_zpp.settings.capability_flags import CAPABILITIES
from zeropp.optim.sharded_optimizer import OPTIMIZER
from zeropp.settings.capabilities import declared
from zeropp.sharding.forecast import node_bytes
from zeropp.wire.rank_group import AXES, Message, sum_of
from zeropp.wire.traffic import HOPS, PURPOSES

Sent = dict[tuple[str, str], float]  # (purpose or axis, hop) -> bytes


def mean_of_nodes(runs: Places, local_steps: PlannedLocalSteps | None = None) -> Sent:
    """Return the mean over nodes of what they send; each run stands for so many places."""
    total: Counter[tuple[str, str]] = Counter()
    for run, count in runs:
        outer = {} if local_steps is None else local_steps.sent_by_node(run)
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
    if run.optimizer.sent_by_node:
        sent.update(run.optimizer.sent_by_node)
        names.insert(len(PURPOSES), OPTIMIZER)
    return {(name, hop): sent[name, hop] for name in names for hop in HOPS}


def axis_forecast(run: PlannedRun) -> Forecast:
    """Return the forecast of what is sent beside weights and gradients."""
    return Forecast(run.config, run.ranks, run.model.split(run.ranks), run.compute_dtype)


def gradient_messages(run: PlannedRun) -> Iterator[Message]:
    """Return what is sent once per step: gradients that ranks of an axis have parts of."""
    model = run.model
    partial: Sequence[nn.Parameter] = ()
    if run.ranks.tensor_size > 1:
        own = set(run.parameters)
        partial = [each for each in model.partial(run.ranks) if each in own]
    tokens = model.split(run.ranks).tokens.weight
    is_tied = run.ranks.pipeline_size > 1 and run.has_end and model.whole.head is None
    tied = [tokens] if is_tied and tokens.requires_grad else []
    return axis_forecast(run).gradients(map(run.shard_size, partial), map(run.shard_size, tied))


def _add(sent: Counter, run: PlannedRun, message: Message, times: int) -> None:
    """Add what all ranks of a node send in a message, each in its own group of ranks."""
    share = run.ranks.nodes.ranks_per_node / message.group.size
    for key, num_bytes in sum_of(map(message.of, message.group.members)).items():
        sent[key] += times * share * num_bytes
