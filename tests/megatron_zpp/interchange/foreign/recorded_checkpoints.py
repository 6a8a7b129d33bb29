"""Checkpoints that other programs wrote, and what their models answered; see tools/record."""

import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.foreign.import_checkpoint import import_checkpoint
from megatron_zpp.interchange.foreign.pickles import load_metadata
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


def error_of(capsys, source: Path, *flags: str) -> str:
    """Run the command, which must fail and write no checkpoint; return what it says."""
    save = source.parent / "ours"
    assert main(["--from-checkpoint", str(source), "--save", str(save), *flags]) == 1
    assert not list(save.glob("iter_*"))
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "Traceback" not in text
    return text


def weights_of(source: Path, save: Path) -> dict[str, Tensor]:
    """Import a checkpoint; return what is then in ours."""
    import_checkpoint(source, save)
    return dict(open_model(save).tensors())


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Assert that all weights are equal."""
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Change what torch.save wrote to `path`; `edit` changes it in place."""
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def change_metadata(folder: Path, edit: Callable[[Metadata], object]) -> None:
    """Change the metadata of torch.distributed.checkpoint in a folder."""
    metadata = load_metadata(folder)
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
