"""Checkpoints that other programs wrote, and what their models answered; see record_*.py."""

import tarfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.model.gpt import GPT

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """tokens int64 [5, B, S + 1]; logits [B, S, V] of the first; the last two steps' losses."""

    tokens: Tensor
    logits: Tensor
    losses: list[float]


def unpack(name: str, folder: Path) -> Path:
    """Unpack a recorded checkpoint to a new folder in `folder`."""
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def answers_of(name: str) -> Answers:
    """What the model of a recorded checkpoint answered."""
    program, model = name.split("_")[0], name.split("_")[-1]
    content = torch.load(RECORDED / f"{program}_{model}_answers.pt")
    return Answers(**{key: content[key] for key in ("tokens", "logits", "losses")})


def next_losses(folder: Path, answers: Answers, *, load_optimizer: bool = True) -> list[float]:
    """The losses of two more steps with the settings of the programs that were recorded."""
    opened = open_model(folder)
    model = GPT(opened.config, opened.tokenizer.vocab_size)
    # Of vectors too, as Megatron-LM's scheduler, which spares them, was not recorded.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    checkpoint.load(folder, model, optimizer, load_optimizer=load_optimizer)
    losses = []
    for batch in answers.tokens[3:]:
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
