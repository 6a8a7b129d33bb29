"""transformers' Trainer on a small Qwen3-MoE that is loaded with expert parallelism."""

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from tests.zeropp.integrations.transformers_run import losses as losses_of
from zeropp.integrations.transformers import ZeroppCallback

VOCAB_SIZE, STEPS, MICRO_BATCHES = 64, 2, 2


def save_model(folder: Path) -> None:
    """Save a small random model, the same each time, by rank 0."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, intermediate_size=48, moe_intermediate_size=24,
            num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.2,
            tie_word_embeddings=False,
        )  # fmt: skip
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    dist.barrier()


def losses(folder: Path, parallel: dict, *callbacks: ZeroppCallback) -> list[float]:
    """The means over all ranks, of steps of several micro-batches.

    `parallel` says how `from_pretrained` splits and shards the model in `folder`.
    """
    model = Qwen3MoeForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(**parallel), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB_SIZE, (64, 16), generator=generator)
    arguments = TrainingArguments(
        str(folder / "out"), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=MICRO_BATCHES, learning_rate=1e-3, save_strategy="no",
        logging_steps=1, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    if "tp_size" in parallel:
        assert arguments.device.type == "cpu"  # starts accelerate, which expects GPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    return losses_of(Trainer(model, arguments, train_dataset=samples, callbacks=[*callbacks]))
