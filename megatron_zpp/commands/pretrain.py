"""Pretrains a GPT, or prints with `--dry-run` what that will take.

megatron-zpp pretrain --data-path books_text_document --save checkpoints --load checkpoints
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from megatron_zpp.commands.early_checks import status_of_mistakes
from megatron_zpp.commands.run_command import load_part
from megatron_zpp.settings.config import Config
from zeropp.ranks.topology import Environment

if TYPE_CHECKING:
    from megatron_zpp.monitor.console import Console


def main(
    argv: Sequence[str], program: str = "megatron-zpp pretrain", *, needs_pretrained: bool = False
) -> int:
    """Run the command; return the exit status."""
    status = status_of_mistakes(argv, program, needs_pretrained=needs_pretrained)
    if status is not None:
        return status
    pretrain = import_module("megatron_zpp.train.pretrain")  # and torch
    return pretrain.main(argv, program, dry_run, needs_pretrained=needs_pretrained)


def dry_run(config: Config, environment: Environment, console: "Console") -> int:
    """Print what a run needs and whether it fits; return the exit status."""
    part = load_part("megatron_zpp.planner", "--dry-run", "dry_run")
    return part.dry_run(config, environment, console)
