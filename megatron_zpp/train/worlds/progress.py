"""How far a run is, for a node that joins it."""

from dataclasses import asdict, dataclass
from typing import Any

from zeropp import LossScaler


@dataclass(kw_only=True)
class RunProgress:
    """The counters of a run, a dataclass that its trainer changes, and the loss scaler of fp16."""

    scaler: LossScaler | None
    counters: Any = None

    def state(self) -> dict[str, Any]:
        """Return what `load` takes, on another node."""
        scaler = self.scaler.state_dict() if self.scaler else {}
        return {"counters": asdict(self.counters), "scaler": scaler}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where another node is; this one has saved nothing of it yet."""
        self.counters.load({**state["counters"], "saved_iteration": 0})
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
