"""A plan's search for the flags of a model, on a cluster that is described, and planned runs."""

from megatron_zpp.planner.parts.meta_model import MetaModel
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_run import PlannedRun, plan_run
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import find_cluster
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp.wire import Nodes

TEXT = "--bf16 --tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 "


def search_for(flags: str, vocab_size: int, **described: object) -> Search:
    """The search on two nodes of A100 GPUs, unless another cluster is described."""
    cluster = find_cluster(**{"cluster": "dgx-a100", "num_nodes": 2, **described})
    return Search(parse((TEXT + flags).split(), cluster.num_ranks), vocab_size, cluster)


def run_at(
    config: Config, vocab_size: int, nodes: Nodes, place: int, *, is_cpu: bool = False
) -> PlannedRun:
    """The planned run of the first rank at a place of a pipeline."""
    model = MetaModel(config.model, vocab_size, capabilities_of(config))
    return plan_run(model, PlannedRanks(config=config, nodes=nodes).at(place), is_cpu=is_cpu)
