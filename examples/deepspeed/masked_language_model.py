"""Fill in masked words, as a program written for DeepSpeed does: the loop of HelloDeepSpeed's BERT.

    zeropp --num_ranks 2 examples/deepspeed/masked_language_model.py --checkpoint_dir checkpoints

Run again with the same folder, it goes on where it stopped.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from zeropp import deepspeed
from zeropp.deepspeed.accelerator import get_accelerator

WORDS, LENGTH, MASK = 64, 24, 1
CONFIGURATION = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}


def arguments() -> argparse.Namespace:
    """Return the program's flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint_dir", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


def batch_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return sentences that repeat one word, some of them masked: what the labels ask for."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(2, WORDS, (8, 1), generator=generator).expand(8, LENGTH)
    masked = torch.rand(8, LENGTH, generator=generator) < 0.15
    masked[:, 0] = True  # a batch without a masked word has no loss
    return {"input_ids": words.masked_fill(masked, MASK), "labels": words.where(masked, -100)}


def main() -> None:
    """Train, save, and print the first and the last loss."""
    args = arguments()
    torch.manual_seed(0)
    model: nn.Module = BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    assert get_accelerator().is_available()
    device = get_accelerator().device_name()
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIGURATION
    )
    start = 0
    if args.checkpoint_dir and (args.checkpoint_dir / "latest").exists():
        _, state = model.load_checkpoint(load_dir=args.checkpoint_dir)
        start = state["checkpoint_step"]
    model.train()
    losses = []
    for step in range(start, start + args.steps):
        batch = batch_of(step, model.global_rank)
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    if args.checkpoint_dir:
        state = {"checkpoint_step": start + args.steps}
        model.save_checkpoint(save_dir=args.checkpoint_dir, client_state=state)
    if model.global_rank == 0:
        print(f"from step {start}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
