"""What a plan says in words: what to use and why, why a row does not fit, what would be needed."""

from dataclasses import replace

from megatron_zpp.planner.replicas import loss_change
from megatron_zpp.planner.search import MUCH_FASTER, TIE, ClusterPlan, Row, Search
from megatron_zpp.planner.timing.hardware import GIB

MOST_RANKS = 8192
ALONE = "Local SGD: each replica trains independently between outer steps"


def why_not(row: Row) -> str:
    """Return why a configuration does not fit, naming the largest kind of memory."""
    kind = row.largest_kind
    return (
        f"needs {row.memory_bytes / GIB:.1f} of {row.usable_bytes / GIB:.1f} GiB, "
        f"{row.memory[kind] / GIB:.1f} of them {kind}"
    )


def advice(plan: ClusterPlan) -> str:
    """Return what to use, whether quantizing pays, and what should cross nodes."""
    crossing = "" if plan.crossing is None else f" {plan.crossing}"
    use = _what_to_use(plan) + crossing
    if plan.advised is plan.best:
        return f"Use {use}" if len(plan.rows) > 1 else use
    return f"{_local_steps(plan)} If the result must not change, use {use}"


def about_flags(plan: ClusterPlan) -> str:
    """Say that the configuration of the flags, which does not fit, is not among the others."""
    row = plan.row_of_flags
    return f"The flags as given do not fit and are not compared: {row.candidate}, {why_not(row)}."


def not_compared(plan: ClusterPlan) -> list[str]:
    """Say why no configuration has tensor ranks, or pipelines, if the trainer refuses them."""
    said = []
    for place, axis in enumerate(("tensor", "pipeline")):
        if len(plan.rows) > 1 and all(row.candidate.sizes[place] == 1 for row in plan.rows):
            why = plan.space.why_undivided(f"{axis}_model_parallel_size")
            said += [f"Not compared: {axis} parallelism, as the trainer says: {why}"] if why else []
    return said


def about_alone(plan: ClusterPlan) -> str:
    """Return what local SGD costs, or why it is not offered."""
    if not plan.alone:
        return "Local SGD is not offered: in a node nothing divides the batch."
    row = plan.alone[0]
    if row.time is None:
        return (
            "Local SGD is not offered: a node must hold a whole replica, and the smallest "
            f"configuration of one, {row.candidate}, {why_not(row)}."
        )
    optimizer = plan.config.optimizer.optimizer
    known = [loss_change(optimizer, each.candidate.interval) for each in plan.alone]
    source = next((f": {each.source}" for each in known if each), "; there is no figure of it")
    return (
        "Local SGD changes the result of training. It is advised where it is more than "
        f"{MUCH_FASTER:g} times as fast as the best of the others. Loss, compared with steps that "
        f"all take together{source}."
    )


def loss_of(row: Row) -> str:
    """Return how the loss of local SGD compares with that of steps that all take together."""
    change = loss_change(row.candidate.config.optimizer.optimizer, row.candidate.interval)
    return "unknown" if change is None else str(change)


def _local_steps(plan: ClusterPlan) -> str:
    row, best = plan.advised, plan.best
    waits = best.time.across_nodes / best.time.typical
    return (
        f"Use local SGD, {row.candidate}: {seconds(row.time.typical)} a step, "
        f"{best.time.typical / row.time.typical:.2g} times as fast as the best of steps that all "
        f"take together, which waits for the links across nodes in {waits:.0%} of its step. It "
        f"changes the result of training, by published and measured losses {loss_of(row)}."
    )


def _what_to_use(plan: ClusterPlan) -> str:
    """Return which steps that all ranks take together to use, and whether quantizing pays."""
    best = plan.best
    if len(plan.rows) == 1:
        waiting = best.time.across_nodes / best.time.typical
        return (
            f"{best.candidate}: {seconds(best.time.typical)} a step, of which {waiting:.0%} waits "
            "for the links across nodes. Without --as-given others are compared with it."
        )
    # `best` itself, if it is one of them.
    exact = next(
        (row for row in (best, *plan.fitting) if not row.candidate.settings.inexactness), None
    )
    use = f"{best.candidate}: {seconds(best.time.typical)} a step{_if_whole(plan)}"
    if exact is None:
        return f"{use}. No unquantized configuration fits."
    if best is not exact:
        times = exact.time.typical / best.time.typical
        compared = f"{times:.2g} times as fast as the best without quantization"
        return f"{use}, {compared} ({exact.candidate}){_why_slower(exact, best)}."
    if plan.cluster.num_nodes == 1:
        return f"{use}. On a single node quantizing does not pay: no slow links are crossed."
    return (
        f"{use}. Quantizing does not pay here: no quantized configuration is faster by more than "
        f"the {TIE:.0%} that a prediction can tell apart."
    )


def _if_whole(plan: ClusterPlan) -> str:
    """Return how fast it is not to split the model, if the best configuration does."""
    if not plan.best.candidate.is_divided:
        return ""
    whole = next((row for row in plan.fitting if not row.candidate.is_divided), None)
    if whole is None:
        return " (without splitting the model nothing fits)"
    return f" ({seconds(whole.time.typical)} without splitting the model: {whole.candidate})"


def _why_slower(row: Row, faster: Row) -> str:
    """Return where a configuration waits, if that is most of what it takes longer."""
    waits = {
        name: (getattr(row.time, part), getattr(faster.time, part))
        for name, part in (("across nodes", "across_nodes"), ("in the node", "in_node"))
    }
    name, (own, other) = max(waits.items(), key=lambda item: item[1][0] - item[1][1])
    if own - other < (row.time.typical - faster.time.typical) / 2:
        return ""
    return f", which waits for the links {name} in {own / row.time.typical:.0%} of its step"


def what_would_fit(search: Search, plan: ClusterPlan) -> str:
    """Return what a model that fits nowhere would need, as an error message."""
    if len(plan.rows) == 1:
        return (
            f"the configuration of the flags does not fit: {why_not(plan.row_of_flags)}; without "
            "--as-given a plan looks for one that does"
        )
    smallest = min(plan.rows, key=lambda row: row.memory_bytes)
    cluster = plan.cluster
    text = (
        f"the model fits nowhere on {cluster.num_ranks} GPUs of "
        f"{cluster.gpu.memory_bytes / GIB:.0f} GiB: the smallest configuration, "
        f"{smallest.candidate}, {why_not(smallest)}"
    )
    needed = smallest.memory_bytes + cluster.reserved_bytes
    larger = f"GPUs of {needed / GIB:.0f} GiB"
    num_nodes = _nodes_that_fit(search, smallest)
    if num_nodes is None:
        parts = "--cpu-optimizer, shorter sequences or a smaller model"
        return f"{text}. It would need {larger}, and more nodes do not help: try {parts}"
    return f"{text}. It would fit on {num_nodes} such nodes, or on {larger}"


def seconds(value: float) -> str:
    """Return a time with three digits."""
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def _nodes_that_fit(search: Search, smallest: Row) -> int | None:
    """Return on how many nodes, doubled as often as needed, the configuration would fit."""
    cluster = search.cluster
    num_nodes = cluster.num_nodes
    while 2 * num_nodes * cluster.gpus_per_node <= MOST_RANKS:
        num_nodes *= 2
        larger = replace(cluster, num_nodes=num_nodes)
        config = smallest.candidate.config
        samples = config.schedules.batch_size.final
        num_replicas = config.parallel.data_parallel_size(larger.num_ranks)
        multiple = num_replicas * config.batch.micro_batch_size
        batch = replace(config.batch, global_batch_size=-(-samples // multiple) * multiple)
        candidate = replace(smallest.candidate, config=replace(config, batch=batch))
        if Search(search.space.base, search.vocab_size, larger).row(candidate).fits:
            return num_nodes
    return None
