"""Where each world saves and loads checkpoints, where nodes step alone."""

from dataclasses import replace
from pathlib import Path

from megatron_zpp.checkpoint.iteration_folders import folder_of_node
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config


def with_own_folders(config: Config, ranks: Ranks) -> Config:
    """Return the configuration with the folders of this world's checkpoints.

    The first world has those that the flags name, and others a folder in each.
    """
    number = ranks.outer.number if ranks.outer else 0
    if not number:
        return config
    options = config.checkpoint
    save, load = (
        each and str(folder_of_node(Path(each), number)) for each in (options.save, options.load)
    )
    return replace(config, checkpoint=replace(options, save=save, load=load))
