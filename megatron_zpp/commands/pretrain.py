"""Pretrains a GPT, or prints with `--dry-run` what that will take.

megatron-zpp pretrain --data-path books_text_document --save checkpoints --load checkpoints
"""

from collections.abc import Sequence

from megatron_zpp.commands.run_command import load_part
from megatron_zpp.monitor.console import Console
from megatron_zpp.settings.config import Config
from megatron_zpp.train import pretrain
from zeropp.ranks.topology import Environment


def main(
    argv: Sequence[str], program: str = "megatron-zpp pretrain", *, needs_pretrained: bool = False
) -> int:
    """Run the command; return the exit status."""
    return pretrain.main(argv, program, dry_run, needs_pretrained=needs_pretrained)


def dry_run(config: Config, environment: Environment, console: Console) -> int:
    """Print what a run needs and whether it fits; return the exit status."""
    part = load_part("megatron_zpp.planner", "--dry-run", "dry_run")
    return part.dry_run(config, environment, console)
