"""Everything that a run holds, found by following all references from it.

What changes while it trains is state, or something that passes. Objects of other packages are
followed where they are containers, modules or optimizers.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor

PACKAGES = ("zeropp", "megatron_zpp")
PLAIN = (bool, int, float, str, bytes, type(None))
Found = Mapping[str, tuple[str, object]]


def all_of(run: object) -> Found:
    """Return where everything is -> what holds it, as `Class.attribute`, and its content.

    Tensors of a model are held by "trained parameter", "persistent buffer" and so on.
    """
    found, seen, queue = {}, {}, deque([("Run", "", run)])
    while queue:
        holder, path, value = queue.popleft()
        if isinstance(value, PLAIN):
            found[path] = holder, value
        elif id(value) not in seen:
            seen[id(value)] = value  # which keeps it alive, and its id its own
            if isinstance(value, torch.Tensor):
                found[path] = holder, _digest(value)
            else:
                queue.extend(
                    (inner or holder, f"{path}.{name}", each)
                    for name, inner, each in _children(value)
                )
    return found


def changed(before: Found, after: Found) -> dict[str, str]:
    """Return the holders of what is new or differs -> where one such thing is."""
    return {
        holder: path
        for path, (holder, content) in after.items()
        if path not in before or before[path][1] != content
    }


def _digest(tensor: torch.Tensor) -> object:
    """Return what tells whether a tensor's content is another one; its own part of a DTensor."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if tensor.is_meta or not tensor.untyped_storage().size():
        return "freed"
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _children(value: object) -> Iterator[tuple[str, str | None, object]]:
    """Yield the names of what an object holds, by what it is held if not by its holder, and it."""
    kind = type(value)
    if isinstance(value, Mapping):
        for key, each in [*value.items()]:
            yield str(key if isinstance(key, PLAIN) else id(key)), None, each
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for number, each in enumerate([*value]):
            yield str(number), None, each
    elif isinstance(value, nn.Module):
        for name, each in value._parameters.items():
            trained = each is not None and each.requires_grad
            yield name, f"{'trained' if trained else 'frozen'} parameter", each
        for name, each in value._buffers.items():
            is_other = name in value._non_persistent_buffers_set
            yield name, f"{'other' if is_other else 'persistent'} buffer", each
        yield from ((name, None, each) for name, each in value._modules.items())
    if isinstance(value, torch.optim.Optimizer):
        yield from ((name, f"Optimizer.{name}", each) for name, each in vars(value).items())
    elif kind.__module__.partition(".")[0] in PACKAGES:
        slots = [
            name for each in kind.__mro__ for name in _as_tuple(getattr(each, "__slots__", ()))
        ]
        for name in (*getattr(value, "__dict__", ()), *slots):
            is_cached = isinstance(getattr(kind, name, None), cached_property)
            is_of_module = isinstance(value, nn.Module) and name.startswith("_")
            if hasattr(value, name) and not is_cached and not is_of_module:
                yield name, f"{kind.__name__}.{name}", getattr(value, name)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
