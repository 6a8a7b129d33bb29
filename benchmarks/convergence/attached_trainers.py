"""The same text under five trainers on CPUs, each sharding by FSDP2, with or without ZeRO++.

accelerate shards by FSDP2 only where ranks have GPUs, or so it is told here, and torchtitan is told
that its device is the CPU, without its kernels for experts and without FlexAttention. Trainers that
take seconds to import are imported when they are asked for.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import zeropp
from benchmarks.convergence.torchtitan_llama import sharded_llama
from benchmarks.shared.training_setup import mean_of_ranks
from zeropp.integrations.transformers import ZeroppCallback

LENGTH, SAMPLES, LR = 64, 8, 5e-4  # tokens of a sample; samples of a rank's micro-batch
Answer = tuple[list[float], zeropp.Attached | None]  # losses of the steps, of all ranks


def train_fsdp2(tokens: torch.Tensor, config: dict | None, _: Path) -> Answer:
    """A loop of one's own."""
    model = llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_layers(model, mesh)
    attached = None if config is None else zeropp.attach(model, config)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    return loop(model, tokens, loss_of), attached


def train_transformers(tokens: torch.Tensor, config: dict | None, folder: Path) -> Answer:
    """Hugging Face's Trainer, through accelerate."""
    samples = [{"input_ids": row, "labels": row} for row in tokens.flatten(0, 2)]
    callbacks = [] if config is None else [ZeroppCallback(config)]
    made = hugging_face_arguments(folder, TrainingArguments, len(tokens))
    return ended(Trainer(llama(), made, train_dataset=samples, callbacks=callbacks), callbacks)


def train_trl(tokens: torch.Tensor, config: dict | None, folder: Path) -> Answer:
    """TRL's supervised fine-tuning."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": row.tolist()} for row in tokens.flatten(0, 2)])
    words = WordLevel({str(number): number for number in range(256)}, "0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="0", pad_token="1"
    )
    callbacks = [] if config is None else [ZeroppCallback(config)]
    made = hugging_face_arguments(folder, SFTConfig, len(tokens), max_length=LENGTH, bf16=False)
    made.activation_checkpointing = False
    options = {"train_dataset": data, "callbacks": callbacks, "processing_class": tokenizer}
    return ended(SFTTrainer(llama(), made, **options), callbacks)


def train_lightning(tokens: torch.Tensor, config: dict | None, folder: Path) -> Answer:
    """Lightning's Trainer with a model-parallel strategy."""
    from benchmarks.convergence.lightning_llama import LlamaModule, train

    module = LlamaModule(llama(), shard_layers, LR)
    attached = train(module, tokens, config, folder)
    return module.losses, attached


def train_torchtitan(tokens: torch.Tensor, config: dict | None, _: Path) -> Answer:
    """torchtitan's smallest Llama, sharded by its own function."""
    model, parallelize = sharded_llama(config)
    positions = torch.arange(LENGTH - 1).expand(SAMPLES, -1)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1], positions)
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    losses = loop(model, tokens, loss_of)
    return losses, None if config is None else parallelize.attached[0]


TRAINERS = MappingProxyType(
    {
        "FSDP2": train_fsdp2,
        "transformers": train_transformers,
        "TRL": train_trl,
        "Lightning": train_lightning,
        "torchtitan": train_torchtitan,
    }
)


def llama() -> LlamaForCausalLM:
    """A small Llama on bytes, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip


def shard_layers(model: LlamaForCausalLM, mesh: Any) -> None:
    """Shard each layer, and the rest, by FSDP2."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def loop(model: nn.Module, tokens: torch.Tensor, loss_of: Any) -> list[float]:
    """Train on `tokens` (steps, ranks, samples, LENGTH); return the mean losses of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for batch in tokens[:, dist.get_rank()]:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_ranks(loss))
    return losses


def hugging_face_arguments(folder: Path, kind: type, steps: int, **more: object) -> Any:
    """Return arguments of a run that accelerate shards by FSDP2."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    made = kind(
        str(folder), use_cpu=True, fsdp=True, max_steps=steps, learning_rate=LR,
        per_device_train_batch_size=SAMPLES, lr_scheduler_type="constant", weight_decay=0.01,
        max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        **more,
    )  # fmt: skip
    assert made.device.type == "cpu"  # starts accelerate
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


def ended(trainer: Trainer, callbacks: list[ZeroppCallback]) -> Answer:
    """Train; return the losses that the Trainer logs."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, callbacks[0].attached if callbacks else None
