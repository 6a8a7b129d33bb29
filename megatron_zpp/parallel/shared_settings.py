"""What all ranks of a run must have alike, as texts to compare and to show.

Each rank reads its own command line, its own JSON and its own copy of the program. Some differences
would train another model without an error: each rank would apply its own learning rate to its
shards. Others would leave ranks waiting for each other.
"""

from pathlib import Path
from typing import Any

import torch

from megatron_zpp.settings.config import SECTIONS, Config
from megatron_zpp.settings.data import SOURCES
from zeropp import ZeroConfig, __version__
from zeropp.native import PACKAGE, source_hash
from zeropp.settings import all_keys, settings_of

OWN = ("logging_level", "num_workers", "tensorboard_queue_size")  # each machine may have its own
OWN_KEYS = ("zeropp.sync_store",)  # a host may have other names elsewhere
PATHS = (  # which may differ between machines, but are given to all or to none
    *(name for names in SOURCES for name in names),
    *("data_cache_path", "vocab_file", "merge_file", "tokenizer_model", "pretrained_checkpoint"),
    *("save", "load", "plan_file", "tensorboard_dir", "wandb_save_dir"),
)
PACKAGES = (Path(__file__).resolve().parents[1], PACKAGE)
DIGITS = 8  # of a hash, to show


def shared_settings(config: Config) -> dict[str, str]:
    """Return the settings that have an effect and the versions, by the names that users know."""
    sources = " ".join(source_hash(folder)[:DIGITS] for folder in PACKAGES)
    texts = {
        "version": f"{__version__}, its sources {sources}",
        "PyTorch": torch.__version__,
    }
    for name, section in SECTIONS.items():
        for entry in settings_of(section):
            if not entry.why_ignored and entry.name not in OWN:
                texts[entry.shown] = _text(entry.name, getattr(getattr(config, name), entry.name))
    for dotted, key in all_keys(ZeroConfig).items():
        if key.subsection is None and not key.why_ignored and dotted not in OWN_KEYS:
            texts[f'"{dotted}"'] = str(config.zero.value(dotted))
    return texts


def _text(name: str, value: Any) -> str:
    if value is None:
        return "not given"
    return "given" if name in PATHS else str(value)
