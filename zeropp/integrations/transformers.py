"""Hugging Face's Trainer, and what is built on it, as TRL's trainers.

args = TrainingArguments(..., fsdp=True)
Trainer(model, args, callbacks=[ZeroppCallback("ds_zeropp_config.json")], ...).train()
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.attach import Attached, attach


class ZeroppCallback(TrainerCallback):
    """Attaches the model when training begins; `attached` is what `zeropp.attach` returned.

    `config` is as for `zeropp.attach`. The Trainer must shard by FSDP2, its default with
    `fsdp=True`. The model stays attached after training, for evaluation and further training.
    """

    def __init__(self, config: ZeroConfig | Mapping | str | Path) -> None:
        self.config = config
        self.attached: Attached | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Attach the model, which the Trainer has sharded."""
        if self.attached is None or self.attached.model is not model:
            self.attached = attach(model, self.config)
