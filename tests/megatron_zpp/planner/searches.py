"""A plan's search for the flags of a model, on a cluster that is described."""

from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import find_cluster
from megatron_zpp.settings.arguments import parse

TEXT = "--bf16 --tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 "


def search_for(flags: str, vocab_size: int, **described: object) -> Search:
    """The search on two nodes of A100 GPUs, unless another cluster is described."""
    cluster = find_cluster(**{"cluster": "dgx-a100", "num_nodes": 2, **described})
    return Search(parse((TEXT + flags).split(), cluster.num_ranks), vocab_size, cluster)
