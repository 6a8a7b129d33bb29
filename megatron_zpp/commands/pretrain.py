"""Pretrains a GPT, or prints with `--dry-run` what that will take.

megatron-zpp pretrain --data-path books_text_document --save checkpoints --load checkpoints

Mistakes in the command line are found here without torch, by `zeropp` before it starts the ranks.
The ranks look for them too, as another launcher may have started them, but seconds later.
"""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from megatron_zpp.commands.run_command import load_part, open_model
from megatron_zpp.data.blend import parse_blend
from megatron_zpp.data.indexed_dataset import require_pair
from megatron_zpp.data.instructions.examples import read_objects
from megatron_zpp.data.text_source import with_named_paths
from megatron_zpp.settings.arguments import parse, require_pretrained
from megatron_zpp.settings.config import Config, DataConfig, TokenizerConfig
from megatron_zpp.settings.data import names_examples
from megatron_zpp.tokenizer import build_tokenizer
from zeropp.errors import InputError, unwritable
from zeropp.ranks import Environment

USAGE_ERROR = 2


def main(
    argv: Sequence[str], program: str = "megatron-zpp pretrain", *, needs_pretrained: bool = False
) -> int:
    """Run the command; return the exit status."""
    status = _status_of_mistakes(argv, program, needs_pretrained=needs_pretrained)
    if status is not None:
        return status
    pretrain = import_module("megatron_zpp.train.pretrain")  # and torch
    return pretrain.main(argv, program, load_planner, open_model, needs_pretrained=needs_pretrained)


def load_planner(flag: str, module: str) -> ModuleType:
    """Return a module of the planner, which `flag` needs."""
    return load_part("megatron_zpp.planner", flag, module)


def check_pretrain(argv: Sequence[str], num_ranks: int, program: str = "pretrain_gpt.py") -> Config:
    """Return the configuration; raise InputError for wrong flags and JSON, and for paths without
    what is needed there. `--help` is printed, and raises SystemExit."""
    config = parse(argv, num_ranks, program)
    if not config.training.dry_run:
        _require_data(config.data)
        _require_tokenizer(config.tokenizer)
        _require_folders(config.pretrained_checkpoint, config.checkpoint.save)
    return config


def check_finetune(argv: Sequence[str], num_ranks: int, program: str = "finetune_gpt.py") -> Config:
    """Do the same for fine-tuning, which needs a pretrained model."""
    config = check_pretrain(argv, num_ranks, program)
    require_pretrained(config.pretrained_checkpoint, program)
    return config


def check_command(argv: Sequence[str], num_ranks: int) -> None:
    """Do the same for `megatron-zpp pretrain` and `finetune`; other commands check themselves."""
    checks = {"pretrain": check_pretrain, "finetune": check_finetune}
    name, *arguments = argv or [""]
    if name in checks:
        checks[name](arguments, num_ranks, f"megatron-zpp {name}")


def _status_of_mistakes(argv: Sequence[str], program: str, *, needs_pretrained: bool) -> int | None:
    """Print what is wrong for a process that is alone, and return its exit status; None: nothing.

    Several ranks have been checked by their launcher, or check together once they have met.
    """
    check = check_finetune if needs_pretrained else check_pretrain
    try:
        if Environment.read().world_size == 1:
            check(argv, 1, program)
    except InputError as error:
        print(f"error: {error}", file=sys.stdout, flush=True)
        return USAGE_ERROR
    return None


def _require_data(data: DataConfig) -> None:
    data = with_named_paths(data)
    has_examples = names_examples(data)
    for paths in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
        if has_examples:
            for path in paths or ():
                next(read_objects(path), None)
        elif paths:
            for prefix in parse_blend(paths)[0]:
                require_pair(prefix)


def _require_tokenizer(tokenizer: TokenizerConfig) -> None:
    files = (tokenizer.tokenizer_model, tokenizer.vocab_file, tokenizer.merge_file)
    if any(file is not None and not Path(file).exists() for file in files):
        build_tokenizer(tokenizer)  # which says what it misses


def _require_folders(pretrained: str | None, save: str | None) -> None:
    if pretrained is not None and not Path(pretrained).exists():
        raise InputError(f"--pretrained-checkpoint {pretrained}: there is no such folder or file")
    if save is not None:
        path = Path(save).absolute()
        existing = next(each for each in (path, *path.parents) if each.exists())
        if not existing.is_dir():
            raise unwritable("--save", save, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK):
            raise unwritable("--save", save, os.strerror(errno.EACCES))
