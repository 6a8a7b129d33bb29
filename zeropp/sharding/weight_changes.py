"""Gathered weights are used again until the shards change; then all of it is forgotten.

Three things outlive one use: hpZ's secondary copies, the whole weights of units that a pass without
a backward left gathered, and a gather that was begun ahead for a unit which was then not used.
Tensor versions cannot tell when they are too old: fused optimizers and writes through `.data` do
not raise them. So the notice comes with calls that all ranks make alike.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeropp import fsdp_adapter as fsdp
from zeropp.sharding.notice import Notice
from zeropp.wire.collectives import SecondaryCopies

Units = Sequence[fsdp.FSDPModule]


def forget_when_weights_change(
    model: nn.Module, units: Units, copies: SecondaryCopies | None
) -> None:
    """Forget after any optimizer's step, and whenever a state is loaded into a part of the model.

    After a step, copies of units whose parameters no optimizer can have changed are kept.
    """
    kept = tuple(weakref.ref(unit) for unit in units)
    kept_copies = weakref.ref(copies) if copies else lambda: None

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        alive = [unit for one in kept if (unit := one()) is not None]
        forget(alive, kept_copies(), stepped_only=not isinstance(optimizer, Notice))

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(model, handle.remove)
    for module in model.modules():
        module.register_load_state_dict_post_hook(lambda *_: forget(units, copies))


def forget(units: Units, copies: SecondaryCopies | None, *, stepped_only: bool = False) -> None:
    """Forget what was gathered of `units`; of the copies, if told so, those an optimizer changed.

    Within a backward pass, as where each gradient steps its optimizer at once, whole weights stay:
    they may be in use, and FSDP2 frees them at the end of it.
    """
    if copies:
        copies.drop(stepped_only=stepped_only)
    if fsdp.backward_id() == -1:
        for unit in units:
            fsdp.forget_gathered(unit)
