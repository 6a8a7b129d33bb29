"""Adapters as PEFT saves them."""

from pathlib import Path

import peft
import torch
from transformers import PreTrainedModel


def of_peft(model: PreTrainedModel, folder: Path, **settings: object) -> peft.PeftModel:
    """PEFT's model with drawn adapters, saved in the folder."""
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(8)
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    theirs.save_pretrained(folder)
    return theirs.eval()
