"""Several sharded models of one rank as one `Sharding`: the stages of a pipeline that it computes.

Each of them is a root of its own, with backward passes of its own. Optimizers, checkpoints and logs
see them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torch import nn

from zeropp.sharding.sharding import Sharding
from zeropp.wire.traffic import JoinedTraffic
from zeropp.wire.weight_steps import StepCounts


@dataclass(frozen=True, kw_only=True)
class JoinedSharding(Sharding):
    """The shardings `parts`; `model` holds all their parameters, and is none of their models."""

    def begin_micro_step(self, *, last: bool) -> None:
        """Set what the next backward pass of every part does with weights and gradients."""
        for part in self.parts:
            part.begin_micro_step(last=last)

    def discard_gradients(self, set_to_none: bool = True) -> None:
        """Clear all gradients of a step, to begin it again."""
        for part in self.parts:
            part.discard_gradients(set_to_none)

    def require_complete_gradients(self) -> None:
        """Raise InputError if a backward pass of a part failed and left gradients."""
        for part in self.parts:
            part.require_complete_gradients()

    def require_same_order(self) -> None:
        """Raise InputError if the ranks reduced different units of a part in its last pass."""
        for part in self.parts:
            part.require_same_order()

    def release(self) -> None:
        """Free weights that forward-only passes, or one that failed, left gathered."""
        for part in self.parts:
            part.release()

    def weights_changed(self) -> None:
        """Drop all gathered weights, hpZ's copies included."""
        for part in self.parts:
            part.weights_changed()

    def last_weight_steps(self) -> StepCounts:
        """Return what the last messages of all parts held."""
        counts = (part.last_weight_steps() for part in self.parts)
        return StepCounts(*map(sum, zip(*counts, strict=True)))


def join(model: nn.Module, parts: Sequence[Sharding]) -> JoinedSharding:
    """Return the shardings of one mesh and one configuration as that of `model`.

    The units are those of the parts one after the other.
    """
    first = parts[0]
    values = {field.name: getattr(first, field.name) for field in fields(Sharding)}
    units, roots = [], []
    for part in parts:
        units += part.units
        roots.append(len(units) - 1)
    if first.forecast is not None:
        pieces = tuple(unit for part in parts for unit in part.forecast.units)
        values["forecast"] = replace(first.forecast, units=pieces, roots=tuple(roots))
    values |= {
        "model": model,
        "units": tuple(units),
        "traffic": JoinedTraffic(part.traffic for part in parts),
        "stores_frozen": any(part.stores_frozen for part in parts),
        "gradient_use": None,
        "weight_changes": None,
        "failed_passes": None,
        "scalars": None,
        "parts": tuple(parts),
    }
    return JoinedSharding(**values)
