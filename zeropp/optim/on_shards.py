"""Which optimizers cannot update shards, found when they are made and not at their first step."""

from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError

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
    """Raise InputError for an optimizer that cannot update the shards that it holds."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED:
            raise InputError(
                f"{type(optimizer).__name__} cannot update sharded weights: "
                f"{_REFUSED[kind.__name__]}"
            )
