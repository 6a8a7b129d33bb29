"""What a capability says of a run, once: everything else is a loop over a run's capabilities."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_zpp.settings.capability_flags import CAPABILITIES
from zeropp.settings import modules_of
from zeropp.wire import Message, Nodes, Traffic

if TYPE_CHECKING:  # a capability of one module has settings, too, that the configuration waits for
    from megatron_zpp.model.attention.sequences import PassRecord
    from megatron_zpp.model.gpt import GPT
    from megatron_zpp.parallel.mesh import RankGrid
    from megatron_zpp.settings.config import Config, ParallelConfig
    from zeropp import Sharding


@dataclass(frozen=True)
class OwnGroup:
    """Parameters that an optimizer updates in another way: the key of groups that says so."""

    key: str
    has: Callable[[str, nn.Parameter], bool]


@dataclass(kw_only=True)
class Capability:
    """A capability of one run; each method says nothing, and does nothing, by default.

    A folder or a module of `megatron_zpp.capabilities` has a `CAPABILITY`, a subclass of this.
    `sharding` and `optimizer` are None until they are built, and in a run that is only planned.
    """

    config: "Config"
    ranks: "RankGrid | None"
    sharding: "Sharding | None" = None
    optimizer: torch.optim.Optimizer | None = None

    setting: ClassVar[tuple[str, Any] | None] = None  # and its value, or what is true of that
    splits: ClassVar[str | None] = None  # what ranks of its axis split, as `Part.axes` calls it
    own_group: ClassVar[OwnGroup | None] = None  # of its optimizer
    ledger: ClassVar[Traffic | None] = None  # of what it sends; an instance may have one

    @property
    def is_on(self) -> bool:
        """Whether a run has the capability."""
        if self.setting is None:
            return True
        name, expected = self.setting
        value = attrgetter(name)(self.config)
        return expected(value) if callable(expected) else value == expected

    def settled(self, nodes: Nodes) -> Mapping[str, Any]:
        """Return settings of ranks (`parallel`) by name that follow from nodes where left open."""
        return {}

    def extend(self, model: "GPT") -> None:
        """Add to the layers of a model, or of a stage of it, before it is sharded."""

    def axis(self) -> Any:
        """Return the ranks that split what it `splits`, or None; all ranks of a run call it."""

    def require_stages(self, model: "GPT", stages: Sequence[range]) -> None:
        """Raise InputError for layers of a model, one of `stages`, that could not be trained."""

    def initialize(self, model: nn.Module) -> None:
        """Write the first values of what `extend` has added; all other weights have theirs."""

    def before_allocation(self, sharding: "Sharding", device: torch.device) -> None:
        """Raise InputError for too little memory, before weights get theirs; all ranks call it."""

    def build_optimizer(
        self,
        sharding: "Sharding",
        groups: list[dict],
        device: torch.device,
        adam: Mapping[str, Any],
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer if it is this capability's; `adam` are the settings of AdamW."""

    def messages(self, num_micro_batches: int) -> Iterable[Message]:
        """Yield what this rank sends in a step."""
        return ()

    def memory(self) -> Mapping[str, int]:
        """Return bytes that it keeps on this rank's device, by kind."""
        return {}

    def records(
        self, num_micro_batches: int, scale: float | Tensor
    ) -> "Sequence[PassRecord] | None":
        """Return the records of a step's micro-batches, which layers write.

        scale: what the losses are multiplied by that layers add to that of a micro-batch.
        """

    def after_passes(
        self, step: int, records: "Sequence[PassRecord] | None"
    ) -> Mapping[str, Tensor]:
        """Return numbers of a step for the log by name, fp64 on the device; all ranks call it."""
        return {}

    def before_update(self, step: int) -> None:
        """Act before the optimizer's update in a step, counted from 1; all ranks call it."""

    def after_update(self, step: int, *, last: bool) -> None:
        """Act after the update; `last` marks the last step of the run. All ranks call it."""

    def state(self) -> Mapping[str, Tensor]:
        """Return what a checkpoint holds of it, by name."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has returned, with the values of a checkpoint."""

    def require_saved(self, saved: Mapping[str, Any], folder: str) -> None:
        """Raise InputError if a checkpoint's settings, by section, do not fit the run."""

    def model_rows(self, model: "GPT") -> Iterable[tuple[str, str]]:
        """Yield rows (name, text) of the table before training that say more of the whole model."""
        return ()

    def rows(self) -> Iterable[tuple[str, str]]:
        """Yield rows (name, text) of the table before training, and of --dry-run."""
        return ()

    def changes(self, saved: Mapping[str, Any], num_ranks: int) -> Iterable[str]:
        """Yield what of the updates to come a resumed run changes.

        saved: settings of the run that saved the checkpoint, by section, on `num_ranks` ranks.
        """
        return ()


def capabilities_of(config: "Config", ranks: "RankGrid | None" = None) -> tuple[Capability, ...]:
    """Return the capabilities of a run, by their names; without ranks, those of its model."""
    kinds = (module.CAPABILITY for module in modules_of("capability", CAPABILITIES))
    every = (kind(config=config, ranks=ranks) for kind in kinds)
    return tuple(each for each in every if each.is_on)


def extended(model: "GPT", capabilities: Iterable[Capability]) -> "GPT":
    """Return a model with what capabilities add to it."""
    for each in capabilities:
        each.extend(model)
    return model


def settled(
    parallel: "ParallelConfig", capabilities: Iterable[Capability], nodes: Nodes
) -> "ParallelConfig":
    """Return settings of ranks that leave nothing open that follows from the nodes.

    Raises InputError for what does not fit them.
    """
    settings = {}
    for each in capabilities:
        settings |= each.settled(nodes)
    return replace(parallel, **settings)


def states_of(capabilities: Sequence[Capability]) -> dict[str, Tensor]:
    """Return what a checkpoint holds of capabilities; names must differ."""
    return {name: value for each in capabilities for name, value in each.state().items()}
