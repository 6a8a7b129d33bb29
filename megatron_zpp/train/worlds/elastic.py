"""Nodes that come and go, as the JSON and the flags describe them."""

from collections.abc import Mapping
from functools import partial

from megatron_zpp.settings.config import Config
from megatron_zpp.train.worlds.saved_run import saved_by_node
from zeropp.errors import InputError
from zeropp.optim.local_steps.elastic_group import ElasticOptions
from zeropp.ranks.topology import Environment

SAME_NODES = (
    "start all nodes with the same command line, the same JSON, the same versions and as many "
    "ranks; only paths may differ"
)


def elastic_options(
    config: Config, environment: Environment, settings: Mapping[str, str]
) -> ElasticOptions | None:
    """Return where nodes meet that come and go; None if they do not step alone.

    `settings` are those that all ranks have alike. Raises InputError for what such nodes cannot do.
    """
    options = config.zero.zeropp
    if options.sync_every == 1:
        return None
    if config.data.skipped:
        raise InputError(
            "--skip-samples names samples of whole batches, and with zeropp.sync_store the size of "
            "a batch follows the number of nodes: leave one of them out"
        )
    return ElasticOptions(
        address=options.sync_store,
        num_nodes=options.sync_nodes,
        settings={"the ranks of a node": str(environment.world_size), **settings},
        advice=SAME_NODES,
        saved_by=partial(saved_by_node, config.checkpoint),
    )
