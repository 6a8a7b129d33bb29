"""Tensors that are written down now and made later: what lets a model be larger than one rank.

Inside `recording()` every tensor made from nothing is a `RecordedTensor`: it has a shape and a place on
a tape, and no memory. Whatever code fills it, a module's own `reset_parameters`, `nn.init` or a
library's second initialization, is written on the tape; `RecordedTensor.made()` plays the part of the
tape that this one tensor depends on. Random numbers are those that would have been drawn without
recording: each drawing op is done once, into memory that is dropped, so that the generator moves
on, and is repeated from the kept state of the generator when its tensor is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zeropp.errors import InputError

aten = torch.ops.aten
_FILLS = (  # write every element of their first argument and read none
    aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar,
)  # fmt: skip
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_DRAWS = torch.Tag.nondeterministic_seeded


def recording() -> AbstractContextManager:
    """Within it, tensors made from nothing are `RecordedTensor`; the rest of torch is as always."""
    return _Recording(Tape())


class RecordedTensor(torch.Tensor):
    """A CPU tensor without memory; `geometry` is a meta tensor whose storage the tape knows."""

    geometry: torch.Tensor
    tape: "Tape"

    @staticmethod
    def __new__(cls, geometry: torch.Tensor, tape: "Tape") -> "RecordedTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, geometry.shape, geometry.stride(), geometry.storage_offset(), dtype=geometry.dtype
        )
        made.geometry, made.tape = geometry, tape
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        """Write the op down, on the tape of its first deferred argument."""
        tape = next(one.tape for one in tree_leaves((args, kwargs)) if isinstance(one, RecordedTensor))
        return tape.run(func, args, kwargs or {})

    def made(self) -> torch.Tensor:
        """A fresh, ordinary CPU tensor with the values this one was given so far."""
        return self.tape.play(self.geometry)

    def tolist(self) -> list:
        return self.made().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.made().numpy(force=force)

    @property
    def data(self) -> "RecordedTensor":
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise InputError(
                f"inside zeropp.zero.Init a tensor of shape {list(self.shape)}, {self.dtype}, was "
                f"given .data of shape {list(value.shape)}, {value.dtype}: make a new nn.Parameter"
            )
        self.geometry = torch.empty_like(self.detach()).copy_(value.detach()).geometry

    def __deepcopy__(self, memo: dict) -> "RecordedTensor":
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RecordedTensor(shape={list(self.shape)}, dtype={self.dtype})"


class Tape:
    """The ops that made or changed deferred storages, in order."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no key is used twice

    def run(self, func: Callable, args: tuple, kwargs: Mapping) -> Any:
        """Do `func` without values and write it down; with values where it needs them now."""
        args, kwargs = tree_map(self._ours_or_made, (args, dict(kwargs)))
        if _NEEDS_VALUES & set(func.tags) or any(_is_real(one) for one in _written(func, args)):
            return self._with_values(func, args, kwargs)
        shapes: dict[int, RecordedTensor] = {}
        try:
            shape_args, shape_kwargs = tree_map(
                lambda one: _shape_only(one, shapes), (args, _on(kwargs, "meta"))
            )
            with _disable_current_modes():
                result = func(*shape_args, **shape_kwargs)
        except NotImplementedError:
            return self._with_values(func, args, kwargs)
        found = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if func._schema.is_mutable or any(_key(one) not in self.storages for one in found):
            self._write(func, args, kwargs, found)
        return tree_map(lambda one: self._wrapped(one, shapes), result)

    def play(self, geometry: torch.Tensor) -> torch.Tensor:
        """Make one tensor: repeat, in order, the ops that its storage depends on."""
        made: dict[int, torch.UntypedStorage] = {}
        state = torch.get_rng_state()
        with _disable_current_modes(), torch.no_grad():
            for index in self._needed(_key(geometry)):
                self.ops[index].play(made)
            whole = _Place.of(geometry).in_memory(made)
        torch.set_rng_state(state)
        return whole

    def _needed(self, storage: int) -> list[int]:
        """Indices of the ops to repeat for the final content of a storage."""
        needed: set[int] = set()
        wanted = [(storage, len(self.ops))]
        while wanted:
            storage, before = wanted.pop()
            for index in range(before - 1, -1, -1):
                op = self.ops[index]
                if storage in op.writes:
                    if index not in needed:
                        needed.add(index)
                        wanted += [(one, index) for one in op.reads - {storage}]
                    if op.fills:
                        break
        return sorted(needed)

    def _write(self, func: Callable, args: tuple, kwargs: dict, found: list) -> None:
        state = torch.get_rng_state() if _DRAWS in func.tags else None
        generator = kwargs.get("generator")
        if generator is not None:
            state, kwargs = generator.get_state(), {**kwargs, "generator": None}
        if state is not None:
            _draw(func, args, kwargs, generator)
        changed = [one.geometry for one in _written(func, args)]
        for one in found:
            self.storages.setdefault(_key(one), one.untyped_storage())
        places = tree_map(_placed, (args, _on(kwargs, "cpu")))
        whole = bool(changed) and changed[0].numel() * changed[0].element_size() == (
            changed[0].untyped_storage().nbytes()
        )
        self.ops.append(
            _Op(
                func=func,
                args=places[0],
                kwargs=places[1],
                results=tuple(_Place.of(one) for one in found),
                writes=frozenset(_key(one) for one in (*changed, *found)),
                reads=frozenset(one.key for one in tree_leaves(places) if isinstance(one, _Place)),
                fills=not changed or (func in _FILLS and whole),
                state=state,
            )
        )

    def _with_values(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        for one in _written(func, args):
            if isinstance(one, RecordedTensor):
                raise InputError(
                    f"{func} cannot be written down inside zeropp.zero.Init: it changes a tensor "
                    "by values that do not exist yet; do it after zeropp.initialize, inside "
                    "zeropp.zero.GatheredParameters"
                )
        args, kwargs = tree_map(_made, (args, kwargs))
        return func(*args, **kwargs)

    def _wrapped(self, value: Any, arguments: Mapping[int, RecordedTensor]) -> Any:
        """The argument that an op gave back, or a new tensor on this tape."""
        if id(value) in arguments:
            return arguments[id(value)]
        return RecordedTensor(value, self) if isinstance(value, torch.Tensor) else value

    def _ours_or_made(self, value: Any) -> Any:
        return value.made() if isinstance(value, RecordedTensor) and value.tape is not self else value


class _Recording(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        from_nothing = not tensors and any(
            str(one.type) == "Tensor" for one in func._schema.returns
        )
        on_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if (from_nothing and not on_meta) or any(isinstance(one, RecordedTensor) for one in tensors):
            return self.tape.run(func, args, kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a storage of the tape."""

    key: int
    storage_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, geometry: torch.Tensor) -> "_Place":
        return cls(
            key=_key(geometry),
            storage_bytes=geometry.untyped_storage().nbytes(),
            dtype=geometry.dtype,
            size=geometry.shape,
            stride=geometry.stride(),
            offset=geometry.storage_offset(),
        )

    def in_memory(self, made: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The tensor, in a storage that is there or is about to be filled."""
        if self.key not in made:
            made[self.key] = torch.UntypedStorage(self.storage_bytes)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(made[self.key], self.offset, self.size, self.stride)


@dataclass(frozen=True, kw_only=True)
class _Op:
    """One op of the tape: its tensors as places, `state` of the generator if it draws."""

    func: Callable
    args: tuple
    kwargs: dict
    results: tuple[_Place, ...]
    writes: frozenset[int]
    reads: frozenset[int]
    fills: bool  # what was there before does not matter
    state: torch.Tensor | None

    def play(self, made: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map(
            lambda one: one.in_memory(made) if isinstance(one, _Place) else one,
            (self.args, self.kwargs),
        )
        if self.state is not None:
            torch.set_rng_state(self.state)
        result = self.func(*args, **kwargs)
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        for place, tensor in zip(self.results, tensors, strict=True):
            made.setdefault(place.key, tensor.untyped_storage())


def _draw(func: Callable, args: tuple, kwargs: dict, generator: torch.Generator | None) -> None:
    """Do an op that draws into memory that is dropped: the generator moves on as without us."""

    def scratch(value: Any) -> Any:
        return torch.empty_like(value.geometry, device="cpu") if _is_deferred(value) else value

    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(scratch, (args, _on(kwargs, "cpu")))
        func(*args, **(kwargs | {"generator": generator} if generator is not None else kwargs))


def _written(func: Callable, args: tuple) -> Iterator[torch.Tensor]:
    """The positional tensors that an op changes."""
    for described, value in zip(func._schema.arguments, args, strict=False):
        alias = described.alias_info
        if alias is not None and alias.is_write and isinstance(value, torch.Tensor):
            yield value


def _shape_only(value: Any, shapes: dict[int, RecordedTensor]) -> Any:
    if _is_deferred(value):
        shapes[id(value.geometry)] = value
        return value.geometry
    return value.to("meta") if isinstance(value, torch.Tensor) and value.ndim else value


def _placed(value: Any) -> Any:
    if _is_deferred(value):
        return _Place.of(value.geometry)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _made(value: Any) -> Any:
    return value.made() if _is_deferred(value) else value


def _on(kwargs: Mapping, device: str) -> dict:
    """Keyword arguments with the device replaced, where there is one."""
    return {
        name: torch.device(device) if isinstance(value, torch.device) else value
        for name, value in kwargs.items()
    }


def _is_deferred(value: Any) -> bool:
    return isinstance(value, RecordedTensor)


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, RecordedTensor)


def _key(geometry: torch.Tensor) -> int:
    return geometry.untyped_storage()._cdata
