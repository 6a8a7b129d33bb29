"""Command lines: their configuration or error, with or without a JSON."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp.errors import InputError


def config_of(line: str, ranks: int = 1, file: Any = None, folder: Path | None = None) -> Config:
    """The configuration for a command line, with a JSON beside it if `file` is given."""
    words = shlex.split(line)
    if file is not None:
        path = folder / "ds.json"
        path.write_text(json.dumps(file))
        words += ["--deepspeed_config", str(path)]
    return parse(words, ranks)


def error_of(line: str, ranks: int = 1, file: Any = None, folder: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        config_of(line, ranks, file, folder)
    return str(caught.value)


def value_at(config: Any, path: str) -> Any:
    """The value at a path such as `model.num_layers`, tuples as lists."""
    for name in path.split("."):
        config = getattr(config, name)
    return list(config) if isinstance(config, tuple) else config
