"""How far a run is, for a replica that joins it."""

from dataclasses import dataclass
from typing import Any

from megatron_zpp.monitor.metrics import History
from megatron_zpp.settings.scheduled_values import Schedules
from megatron_zpp.train.inputs import Batches
from zeropp import LossScaler


@dataclass(kw_only=True)
class RunProgress:
    """What determines the next steps beside weights, and the losses up to now.

    schedules: those of the run, which flags or a checkpoint may have given.
    """

    scaler: LossScaler | None
    counters: Any  # with `state` and `load`
    schedules: Schedules
    history: History
    batches: Batches

    def state(self) -> dict[str, Any]:
        """Return what `load` takes, on another replica."""
        scaler = self.scaler.state_dict() if self.scaler else {}
        return {
            "counters": self.counters.state(),
            "scaler": scaler,
            "schedules": self.schedules,
            "history": self.history.state_dict(),
            "earlier_sizes": self.batches.earlier_sizes,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where another replica is."""
        self.counters.load(state["counters"])
        self.schedules = state["schedules"]
        self.history.load_state_dict(state["history"])
        self.batches.go_behind(state["earlier_sizes"])
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
