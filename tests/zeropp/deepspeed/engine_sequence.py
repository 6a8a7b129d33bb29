"""What random sequences of an engine's calls do alike, whatever their models are."""

import copy
from pathlib import Path

import torch
from torch import nn

from zeropp.deepspeed.engine import Engine


class EngineSequence:
    """An engine, one process's model and optimizer, and the calls so far."""

    engine: Engine
    reference: nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path
    calls: list[str]
    saved: tuple[dict, dict] | None = None

    def learn(self, losses: list[torch.Tensor], max_norm: float) -> None:
        """A step of the one process, by the mean of its losses."""
        (sum(losses) / len(losses)).backward()
        nn.utils.clip_grad_norm_(self.reference.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder, tag=f"at_{len(self.calls)}")
        states = self.reference.state_dict(), self.optimizer.state_dict()
        self.saved = copy.deepcopy(states)

    def load(self) -> None:
        if self.saved is not None:
            self.engine.load_checkpoint(self.folder)
            self.reference.load_state_dict(self.saved[0])
            self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))
