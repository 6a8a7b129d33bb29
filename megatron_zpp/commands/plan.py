"""Says before a cluster is rented which configuration of a run fits on it and is fastest.

    megatron-zpp plan FLAGS OF THE RUN --cluster dgx-a100 --nodes 4 --link 25gbit

Nothing is trained and no GPU is needed. The flags of the run are read as `pretrain_gpt.py` reads
them. docs/planning.md says how far the predictions can be trusted.
"""

import gc
import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from megatron_zpp.checkpoint.pretrained_model import with_initial_model
from megatron_zpp.commands.run_command import open_model, require_writable
from megatron_zpp.data.text_source import resolve_vocab_size
from megatron_zpp.planner.advice import what_would_fit
from megatron_zpp.planner.calibration import calibrate_by_log
from megatron_zpp.planner.plan_chart import draw, require_matplotlib
from megatron_zpp.planner.plan_table import plan_json, print_plan
from megatron_zpp.planner.search import ClusterPlan, Search
from megatron_zpp.planner.timing.hardware import BY_HAND, Cluster, find_cluster
from megatron_zpp.settings.arguments import FLAG_SECTIONS, VOCABULARY, parse
from megatron_zpp.settings.command_line import (
    HELP,
    build_section,
    help_text,
    read,
    split_flags,
    vocabulary,
)
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from zeropp import ZeroConfig
from zeropp.atomic import write_atomically
from zeropp.errors import InputError
from zeropp.settings import read_json

USAGE = """\
usage: {program} [FLAGS OF THE RUN] --cluster NAME --nodes N [FLAGS]

Compares the configurations of a training run on a cluster that you do not have: memory, bytes
between nodes and step time. The flags of the run are those of pretrain_gpt.py."""
ROUNDING = 0.05  # by how much --batch-tokens may be rounded
ROWS_OF_A_LINE = 100  # where progress is no terminal's
USAGE_ERROR, FITS_NOWHERE = 2, 1
DESCRIBED = ("cluster", "gpus_per_node", "link", "gpu", *BY_HAND)  # flags of a cluster
_COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True, kw_only=True)
class PlanFlags(Section):
    """What to plan for"""

    cluster: str | None = flag(None, "nodes and links from the table, as dgx-h100")
    nodes: int = flag(1, "nodes of the cluster", minimum=1)
    gpu: str | None = flag(None, "GPU from the table, as a100-80gb (default: the cluster's)")
    gpus_per_node: int | None = flag(None, "default: the cluster's", minimum=1)
    link: str | None = flag(None, "rate of a node's links in each direction, as 25gbit")
    gpu_tflops: float | None = flag(None, "peak TFLOP/s of a GPU's matrix products", above=0)
    gpu_bandwidth: float | None = flag(None, "TB/s of a GPU's memory", above=0)
    gpu_memory: float | None = flag(None, "GiB of a GPU's memory", above=0)
    node_bandwidth: float | None = flag(
        None, "GB/s that a GPU sends to the others of its node", above=0
    )
    batch_tokens: str | None = flag(
        None,
        "tokens of a step, as 4M, instead of --global-batch-size; rounded to whole samples",
    )
    as_given: bool = flag(False, "evaluate only the configuration of the flags")
    top: int = flag(12, "rows of the table", minimum=1)
    json: str | None = flag(None, "write the plan to this file; - prints only it")
    plot: str | None = flag(None, "draw the plan to this .png (needs matplotlib)")
    calibrate: tuple[str, ...] | None = flag(
        None, "metrics.jsonl of runs with these flags on such hardware, on one node and on several"
    )


def main(argv: Sequence[str], program: str = "megatron-zpp plan") -> int:
    """Print the plan; return 0, 1 if the model fits nowhere, or 2 for a mistake in the flags."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if any(word in HELP for word in argv):
        print(
            help_text(
                USAGE.format(program=program), (PlanFlags, *FLAG_SECTIONS), flags_without_effect()
            )
        )
        return 0
    try:
        flags, run_argv = split(argv)
        require_outputs(flags)
        cluster = find_cluster(
            num_nodes=flags.nodes, **{name: getattr(flags, name) for name in DESCRIBED}
        )
        config, vocab_size = read_run(run_argv, flags, cluster, program)
        for path in flags.calibrate or ():
            cluster = calibrate_by_log(cluster, config, vocab_size, path)
        search = Search(config, vocab_size, cluster)
        console = Console(stderr=True, highlight=False)
        with console.status("comparing configurations") as status:

            def show(count: int) -> None:
                text = f"{count} configurations compared"
                status.update(text)
                if not console.is_terminal and count % ROWS_OF_A_LINE == 0:
                    console.print(text)

            gc.disable()  # nearly all that is made stays, and looking through it takes a sixth more
            try:
                plan = search.run(only_flags=flags.as_given, on_row=show)
            finally:
                gc.enable()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    report(plan, flags)
    if not plan.fitting:
        print(f"error: {what_would_fit(search, plan)}", file=sys.stderr)
        return FITS_NOWHERE
    if flags.plot is not None:
        write_atomically(flags.plot, lambda file: draw(plan, search, file))
    return 0


def require_outputs(flags: PlanFlags) -> None:
    """Raise InputError for files that cannot be written, before anything is computed."""
    if flags.json not in (None, "-"):
        require_writable(flags.json, "--json")
    if flags.plot is not None:
        require_matplotlib()
        require_writable(flags.plot, "--plot")
        if not flags.plot.endswith(".png"):
            raise InputError(f"--plot {flags.plot}: expected a name that ends with .png")


def split(argv: Sequence[str]) -> tuple[PlanFlags, list[str]]:
    """Return the flags of this command, and the words of the run's own flags.

    Raises InputError for flags that neither knows, naming the nearest.
    """
    own = vocabulary((PlanFlags,))
    typed = read(argv, {**VOCABULARY, **own})
    _, run_argv = split_flags(argv, own)
    flags = build_section(PlanFlags, typed)
    if flags.batch_tokens is not None and "global_batch_size" in typed:
        raise InputError("--batch-tokens and --global-batch-size set the same: give one of them")
    return flags, run_argv


def read_run(
    argv: Sequence[str], flags: PlanFlags, cluster: Cluster, program: str
) -> tuple[Config, int]:
    """Return the run's configuration on the ranks of `cluster`, and its vocabulary's size.

    Raises InputError for a run that cannot be planned.
    """
    is_described = _describes_adapted_model(argv)
    if is_described:
        argv = [*argv, "--pretrained-checkpoint", "described by the flags"]
    num_ranks = _ranks_of_a_launch(argv, cluster)
    if flags.batch_tokens is not None:
        config = parse(argv, num_ranks, program)
        num_replicas = config.parallel.data_parallel_size(cluster.num_ranks)
        tokens = parse_count(flags.batch_tokens, "--batch-tokens")
        each = samples_per_replica(tokens / config.model.seq_length / num_replicas)
        argv = [*argv, "--global-batch-size", str(each * num_replicas)]
    config = parse(argv, num_ranks, program)
    if num_ranks < cluster.num_ranks:  # as if all replicas were fixed
        zeropp = replace(config.zero.zeropp, sync_store=None, sync_nodes=None)
        config = replace(config, zero=replace(config.zero, zeropp=zeropp))
    if not is_described:
        config, _ = with_initial_model(config, open_model)
    config.require_none_of("OBSTACLES_TO_A_PLAN")
    if config.training.dry_run:
        raise InputError("--dry-run and a plan are two things: leave --dry-run out")
    return config, resolve_vocab_size(config.data, config.tokenizer)


def _ranks_of_a_launch(argv: Sequence[str], cluster: Cluster) -> int:
    """Return how many ranks are launched together: those of a node if replicas join and leave.

    Raises InputError if these are not the nodes of the cluster.
    """
    typed = read(argv, VOCABULARY)
    if "deepspeed_config" not in typed:
        return cluster.num_ranks
    values = read_json(typed["deepspeed_config"].value, ZeroConfig).values
    if values.get("zeropp.sync_every", 1) == 1 or values.get("zeropp.sync_store") is None:
        return cluster.num_ranks
    num_nodes = values.get("zeropp.sync_nodes", cluster.num_nodes)
    if num_nodes != cluster.num_nodes:
        raise InputError(
            f"zeropp.sync_nodes = {num_nodes} and --nodes {cluster.num_nodes}: a plan is of all "
            "nodes with which the run begins: give the same number"
        )
    return cluster.gpus_per_node


def _describes_adapted_model(argv: Sequence[str]) -> bool:
    """Whether the flags describe a model that gets adapters, which is then not needed itself."""
    typed = read(argv, VOCABULARY)
    return "lora_rank" in typed and "pretrained_checkpoint" not in typed


def parse_count(text: str, name: str) -> float:
    """Read a number such as 4M or 250000; raises InputError unless it is above 0."""
    digits, unit = (text[:-1], text[-1].lower()) if text[-1].isalpha() else (text, "")
    try:
        count = float(digits) * (_COUNTS[unit] if unit else 1)
    except (ValueError, KeyError):
        count = 0.0
    if not 0 < count < float("inf"):
        raise InputError(f"{name} {text}: expected a number above 0, as 4M or 250000")
    return count


def samples_per_replica(wanted: float) -> int:
    """Return a number of samples near the wanted one that divides into micro-batches best."""
    lowest, highest = math.ceil(wanted * (1 - ROUNDING)), math.floor(wanted * (1 + ROUNDING))
    near = {*range(lowest, highest + 1), round(wanted)} - {0}
    return max(near or {1}, key=lambda samples: (samples & -samples, -abs(samples - wanted)))


def report(plan: ClusterPlan, flags: PlanFlags) -> None:
    """Print the plan, and write it as JSON if asked for."""
    if flags.json is None:
        print_plan(plan, flags.top)
        return
    text = json.dumps(plan_json(plan), indent=1)
    if flags.json == "-":
        print(text)
        return
    write_atomically(flags.json, lambda file: file.write(text.encode()))
    print_plan(plan, flags.top)
