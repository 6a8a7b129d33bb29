"""Which optimizers cannot update shards, found when they are made and not at their first step."""

import logging
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError
from zeropp.optim.sharded_optimizer import takes_factor

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
    kinds = [{isinstance(x, DTensor) for x in group["params"]} for group in optimizer.param_groups]
    if True not in set().union(*kinds):
        return
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED:
            raise InputError(
                f"{type(optimizer).__name__} cannot update sharded weights: "
                f"{_REFUSED[kind.__name__]}"
            )
    if takes_factor(optimizer):
        return
    for group, are_sharded in zip(optimizer.param_groups, kinds, strict=True):
        is_mixed, fuses = len(are_sharded) == 2, isinstance(optimizer, _FUSED)
        for name, is_taken in (("foreach", not is_mixed), ("fused", not is_mixed and fuses)):
            if group.get(name) and True in are_sharded and not is_taken:
                group[name] = False
                which = "parameters of which only some are sharded" if is_mixed else "shards"
                log.info("%s: %s has no effect on %s", type(optimizer).__name__, name, which)
