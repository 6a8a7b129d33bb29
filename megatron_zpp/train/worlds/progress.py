"""How far a run is, for a node that joins it."""

from dataclasses import dataclass
from typing import Any, Protocol

from zeropp import LossScaler


class Counted(Protocol):
    """The counters of a run."""

    def state(self) -> dict[str, int]: ...

    def load(self, state: dict[str, int]) -> None: ...


@dataclass(kw_only=True)
class RunProgress:
    """The counters of a run, which its trainer changes, and the loss scaler of fp16."""

    scaler: LossScaler | None
    counters: Counted

    def state(self) -> dict[str, Any]:
        """Return what `load` takes, on another node."""
        scaler = self.scaler.state_dict() if self.scaler else {}
        return {"counters": self.counters.state(), "scaler": scaler}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where another node is."""
        self.counters.load(state["counters"])
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
