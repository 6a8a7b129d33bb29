"""Which optimizers cannot update shards, found when they are made and not at their first step."""

import logging
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError

_FUSED = (torch.optim.Adam, torch.optim.AdamW)  # PyTorch has a rule for their kernels on shards
log = logging.getLogger("zeropp")
# By the names of classes, as other libraries have optimizers of these names too.
_REFUSED = MappingProxyType(
    {
        "Adafactor": "its factors are means over whole matrices, and ranks have parts of them; for "
        "less memory use offload_optimizer, or zeropp.optim.CPUAdam(fp32_optimizer_states=False)",
        "LBFGS": "it evaluates the loss several times in each step; use torch.optim.AdamW",
        "Rprop": "PyTorch has no rule for its operations on shards; use torch.optim.RMSprop",
        "SparseAdam": "gradients of shards are not sparse; use torch.optim.Adam, and "
        "torch.nn.Embedding(sparse=False)",
    }
)


def require_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for an optimizer that cannot update the shards that it holds.

    Where PyTorch cannot update all parameters of a group in one call, `foreach` and `fused` are
    switched off, with a line.
    """
    sharded = [group for group in optimizer.param_groups if any(map(_is_shard, group["params"]))]
    if not sharded:
        return
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED:
            raise InputError(
                f"{type(optimizer).__name__} cannot update sharded weights: "
                f"{_REFUSED[kind.__name__]}"
            )
    for group in () if getattr(optimizer, "takes_factor", False) else sharded:
        is_mixed = not all(map(_is_shard, group["params"]))
        unavailable = ["foreach"] * is_mixed
        unavailable += ["fused"] * (is_mixed or not isinstance(optimizer, _FUSED))
        if names := [name for name in unavailable if group.get(name)]:
            group.update(dict.fromkeys(names, False))
            which = "parameters of which only some are sharded" if is_mixed else "shards"
            text = "%s: %s has no effect on %s: they are updated one by one"
            log.info(text, type(optimizer).__name__, " and ".join(names), which)


def _is_shard(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor)
