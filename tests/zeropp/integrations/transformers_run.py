"""Hugging Face's Trainer on a small Llama: takes a second to import, so only the ranks do."""

from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from zeropp.integrations.transformers import ZeroppCallback

STEPS = 4


def llama() -> LlamaForCausalLM:
    """A small Llama with a tied head, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes, **heads))


def arguments(folder: Path, kind: type = TrainingArguments, **more: object) -> TrainingArguments:
    """Arguments of a run that is sharded by FSDP2.

    accelerate shards by FSDP2 only where the ranks have GPUs, or so it is told here.
    """
    options = {"save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    options |= {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    made = kind(str(folder), use_cpu=True, fsdp=True, **options | more)
    assert made.device.type == "cpu"  # starts accelerate
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


def losses(trainer: Trainer, **options: object) -> list[float]:
    trainer.train(**options)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(
    folder: Path, *callbacks: ZeroppCallback, model: object = None, **more: object
) -> Trainer:
    return Trainer(
        model or llama(), arguments(folder, **more), train_dataset=samples(), callbacks=[*callbacks]
    )
