"""DeepSpeed's training loop with another import: train a small Transformer on bytes of Python.

zeropp --num_ranks 2 examples/train_engine.py --deepspeed_config examples/ds_train_engine.json
"""

import argparse
import logging
from pathlib import Path

import torch
from standard_library import StandardLibrary
from torch import nn
from torch.nn import functional as F

import zeropp

LENGTH, WIDTH, LAYERS = 64, 96, 3


class ByteModel(nn.Module):
    """The mean loss of predicting the next byte: inputs and labels (samples, LENGTH) -> ()."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=inputs.device)
        x = self.bytes(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, help="checkpoint folder; resumed if it exists")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    with zeropp.zero.Init():  # takes no memory until the weights are sharded
        net = ByteModel()
    model_engine, optimizer, trainloader, scheduler = zeropp.initialize(
        args=args,
        model=net,
        model_parameters=net.parameters(),
        training_data=StandardLibrary(LENGTH),
    )
    if args.save and (args.save / "latest").exists():
        model_engine.load_checkpoint(args.save)

    while model_engine.global_steps < args.steps:
        for inputs, labels in trainloader:
            loss = model_engine(inputs.to(model_engine.device), labels.to(model_engine.device))
            model_engine.backward(loss)
            model_engine.step()
            if model_engine.global_steps == args.steps:
                break
    if args.save:
        model_engine.save_checkpoint(args.save)
        model_engine.save_16bit_model(args.save)


if __name__ == "__main__":
    main()
