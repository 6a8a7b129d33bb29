"""Train a transformer in bf16, as DeepSpeed's bf16_master_weight example does.

    zeropp --num_ranks 2 examples/deepspeed/bf16_training.py \
        --deepspeed_config examples/deepspeed/bf16_zero3.json
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeropp import deepspeed
from zeropp.deepspeed.accelerator import get_accelerator


def arguments() -> argparse.Namespace:
    """Return the program's flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_dim", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--seq_length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--log_interval", type=int, default=10)
    parser.add_argument("--activation_checkpointing", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class Transformer(nn.Module):
    """A small causal transformer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.recomputes = args.activation_checkpointing
        self.embedding = nn.Embedding(args.vocab_size, args.hidden_dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                args.hidden_dim, args.num_heads, 4 * args.hidden_dim, dropout=0.0, batch_first=True
            )
            for _ in range(args.num_layers)
        )
        self.head = nn.Linear(args.hidden_dim, args.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens, (batch, sequence)."""
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device, dtype=hidden.dtype
        )
        for layer in self.layers:
            if self.recomputes and self.training:
                hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, mask)
        return self.head(hidden)


def main() -> None:
    """Train, and print the first and the last loss."""
    args = arguments()
    deepspeed.init_distributed()
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    device = get_accelerator().device_name(max(args.local_rank, 0))
    torch.manual_seed(args.seed)
    model = Transformer(args)
    config = json.loads(args.deepspeed_config.read_text())
    config["train_batch_size"] = args.batch_size * world_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )
    engine.train()
    generator = torch.Generator().manual_seed(args.seed + rank)
    losses = []
    for step in range(args.steps):
        first = torch.randint(0, args.vocab_size, (args.batch_size, 1), generator=generator)
        tokens = (first + torch.arange(args.seq_length + 1)) % args.vocab_size  # they count
        tokens = tokens.to(device)
        logits = engine(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if rank == 0 and (step + 1) % args.log_interval == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    engine.destroy()


if __name__ == "__main__":
    main()
