"""Tensors whose creation is recorded and replayed later, so that a model may exceed one rank's
memory.

Inside `recording()` every newly created tensor is a `RecordedTensor`: it has a shape and an entry
on a tape, but no memory. Whatever initializes it, such as a module's `reset_parameters`, `nn.init`
or a library's second initialization, is recorded on the tape. `RecordedTensor.materialize()`
replays the part of the tape that this tensor depends on. Random numbers are the same as without
recording: each random op runs once into temporary memory, which advances the generator, and runs
again from the saved generator state when its tensor is materialized.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zeropp.errors import InputError

aten = torch.ops.aten
RECORDED_ATTRIBUTES = ("geometry", "tape", "is_first_ranks")  # no ordinary tensor has them
_FILL_OPS = (  # write every element of their first argument and read none
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
)
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RANDOM = torch.Tag.nondeterministic_seeded
_PAUSED: ContextVar[bool] = ContextVar("paused", default=False)


def recording() -> AbstractContextManager:
    """Return a context in which newly created tensors are `RecordedTensor`s."""
    return _Recording(Tape())


@contextmanager
def not_recording() -> Iterator[None]:
    """Let an enclosing `recording` make ordinary tensors; recorded ones stay what they are."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


class RecordedTensor(torch.Tensor):
    """A CPU tensor without memory; `geometry` is a meta tensor whose storage the tape knows."""

    geometry: torch.Tensor
    tape: "Tape"
    is_first_ranks: bool = False  # only the first rank has been given the values

    @staticmethod
    def __new__(cls, geometry: torch.Tensor, tape: "Tape") -> "RecordedTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, geometry.shape, geometry.stride(), geometry.storage_offset(), dtype=geometry.dtype
        )
        tensor.geometry, tensor.tape = geometry, tape
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        """Record the op on the tape of its first recorded argument."""
        recorded = filter(_is_recorded, tree_leaves((args, kwargs)))
        return next(recorded).tape.run(func, args, kwargs or {})

    def materialize(self) -> torch.Tensor:
        """Return a new, ordinary CPU tensor with the values this one has been given so far."""
        return self.tape.replay(self.geometry)

    def tolist(self) -> list:
        return self.materialize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.materialize().numpy(force=force)

    @property
    def data(self) -> "RecordedTensor":
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        recorded = self.detach().new_empty(value.shape, dtype=value.dtype).copy_(value.detach())
        torch.Tensor.data.__set__(self, recorded)  # another shape or dtype, where it has one
        self.geometry = recorded.geometry

    def __deepcopy__(self, memo: dict) -> "RecordedTensor":
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RecordedTensor(shape={list(self.shape)}, dtype={self.dtype})"


class Tape:
    """The ops that created or changed recorded storages, in order."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive so that no key is reused

    def run(self, func: Callable, args: tuple, kwargs: Mapping) -> Any:
        """Run `func` on shapes only and record it; on values where the op needs them now."""
        args, kwargs = tree_map(self._materialize_if_foreign, (args, dict(kwargs)))
        writes_values = any(_is_ordinary(tensor) for tensor in _written_tensors(func, args, kwargs))
        if _NEEDS_VALUES & set(func.tags) or writes_values:
            return self._run_on_values(func, args, kwargs)
        shapes: dict[int, RecordedTensor] = {}
        try:
            shape_args, shape_kwargs = tree_map(
                lambda value: _shape_only(value, shapes), (args, _with_device(kwargs, "meta"))
            )
            with _disable_current_modes():
                result = func(*shape_args, **shape_kwargs)
        except NotImplementedError:
            return self._run_on_values(func, args, kwargs)
        results = _tensors_in(result)
        creates_storage = any(_storage_key(tensor) not in self.storages for tensor in results)
        if func._schema.is_mutable or creates_storage:
            self._record(func, args, kwargs, results)
        return tree_map(lambda value: self._wrap(value, shapes), result)

    def replay(self, geometry: torch.Tensor) -> torch.Tensor:
        """Materialize one tensor: repeat, in order, the ops that its storage depends on."""
        storages: dict[int, torch.UntypedStorage] = {}
        state = torch.get_rng_state()
        with _disable_current_modes(), torch.no_grad():
            for index in self._dependencies(_storage_key(geometry)):
                self.ops[index].replay(storages)
            tensor = _Place.of(geometry).tensor_in(storages)
        torch.set_rng_state(state)
        return tensor

    def _dependencies(self, storage: int) -> list[int]:
        """Return the indices of the ops that the final content of a storage depends on."""
        indices: set[int] = set()
        pending = [(storage, len(self.ops))]
        while pending:
            storage, end = pending.pop()
            for index in range(end - 1, -1, -1):
                op = self.ops[index]
                if storage in op.writes:
                    if index not in indices:
                        indices.add(index)
                        pending += [(source, index) for source in op.reads - {storage}]
                    if op.fills:
                        break
        return sorted(indices)

    def _record(self, func: Callable, args: tuple, kwargs: dict, results: list) -> None:
        state = torch.get_rng_state() if _RANDOM in func.tags else None
        generator = kwargs.get("generator")
        if generator is not None:
            state, kwargs = generator.get_state(), {**kwargs, "generator": None}
        if state is not None:
            _advance_generator(func, args, kwargs, generator)
        changed = [tensor.geometry for tensor in _written_tensors(func, args, kwargs)]
        for tensor in results:
            self.storages.setdefault(_storage_key(tensor), tensor.untyped_storage())
        places = tree_map(_to_place, (args, _with_device(kwargs, "cpu")))
        sources = (leaf for leaf in tree_leaves(places) if isinstance(leaf, _Place))
        whole = bool(changed) and changed[0].numel() * changed[0].element_size() == (
            changed[0].untyped_storage().nbytes()
        )
        self.ops.append(
            _Op(
                func=func,
                args=places[0],
                kwargs=places[1],
                results=tuple(_Place.of(tensor) for tensor in results),
                writes=frozenset(_storage_key(tensor) for tensor in (*changed, *results)),
                reads=frozenset(place.key for place in sources),
                fills=not changed or (func in _FILL_OPS and whole),
                state=state,
            )
        )

    def _run_on_values(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        for tensor in _written_tensors(func, args, kwargs):
            if isinstance(tensor, RecordedTensor):
                raise InputError(
                    f"{func} cannot be recorded inside zeropp.zero.Init: it changes a tensor "
                    "by values that do not exist yet; do it after zeropp.initialize, inside "
                    "zeropp.zero.GatheredParameters"
                )
        args, kwargs = tree_map(_materialize, (args, kwargs))
        return func(*args, **kwargs)

    def _wrap(self, value: Any, arguments: Mapping[int, RecordedTensor]) -> Any:
        """Return the argument that an op returned, or a new tensor on this tape."""
        if id(value) in arguments:
            return arguments[id(value)]
        return RecordedTensor(value, self) if isinstance(value, torch.Tensor) else value

    def _materialize_if_foreign(self, value: Any) -> Any:
        """Turn tensors of another tape into ordinary ones."""
        is_foreign = _is_recorded(value) and value.tape is not self
        return value.materialize() if is_foreign else value


class _Recording(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors_in((args, kwargs))
        if _PAUSED.get() and not any(map(_is_recorded, tensors)):
            return func(*args, **kwargs)
        is_factory = not tensors and any(
            str(result.type) == "Tensor" for result in func._schema.returns
        )
        on_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if (is_factory and not on_meta) or any(map(_is_recorded, tensors)):
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
            key=_storage_key(geometry),
            storage_bytes=geometry.untyped_storage().nbytes(),
            dtype=geometry.dtype,
            size=geometry.shape,
            stride=geometry.stride(),
            offset=geometry.storage_offset(),
        )

    def tensor_in(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return the tensor, in a storage that exists already or is allocated here."""
        if self.key not in storages:
            storages[self.key] = torch.UntypedStorage(self.storage_bytes)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storages[self.key], self.offset, self.size, self.stride)


@dataclass(frozen=True, kw_only=True)
class _Op:
    """One op of the tape: its tensors as places; `state` is the generator's if the op is random."""

    func: Callable
    args: tuple
    kwargs: dict
    results: tuple[_Place, ...]
    writes: frozenset[int]
    reads: frozenset[int]
    fills: bool  # overwrites the whole storage, so earlier ops do not matter
    state: torch.Tensor | None

    def replay(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run the op on `storages`, and add those it creates."""
        args, kwargs = tree_map(
            lambda value: value.tensor_in(storages) if isinstance(value, _Place) else value,
            (self.args, self.kwargs),
        )
        if self.state is not None:
            torch.set_rng_state(self.state)
        result = self.func(*args, **kwargs)
        for place, tensor in zip(self.results, _tensors_in(result), strict=True):
            storages.setdefault(place.key, tensor.untyped_storage())


def _advance_generator(
    func: Callable, args: tuple, kwargs: dict, generator: torch.Generator | None
) -> None:
    """Run a random op into temporary memory: the generator advances as it would unrecorded."""

    def temporary(value: Any) -> Any:
        return torch.empty_like(value.geometry, device="cpu") if _is_recorded(value) else value

    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(temporary, (args, _with_device(kwargs, "cpu")))
        if generator is not None:
            kwargs = kwargs | {"generator": generator}
        func(*args, **kwargs)


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written_tensors(func: Callable, args: tuple, kwargs: Mapping) -> list[torch.Tensor]:
    """Return the tensors that an op changes: arguments, `out=`, and those in lists of tensors."""
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    written = [
        values.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors_in(written)


def _shape_only(value: Any, shapes: dict[int, RecordedTensor]) -> Any:
    if _is_recorded(value):
        shapes[id(value.geometry)] = value
        return value.geometry
    return value.to("meta") if isinstance(value, torch.Tensor) and value.ndim else value


def _to_place(value: Any) -> Any:
    if _is_recorded(value):
        return _Place.of(value.geometry)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _materialize(value: Any) -> Any:
    return value.materialize() if _is_recorded(value) else value


def _with_device(kwargs: Mapping, device: str) -> dict:
    """Return keyword arguments with the device replaced, where there is one."""
    return {
        name: torch.device(device) if isinstance(value, torch.device) else value
        for name, value in kwargs.items()
    }


def _is_recorded(value: Any) -> bool:
    return isinstance(value, RecordedTensor)


def _is_ordinary(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, RecordedTensor)


def _storage_key(geometry: torch.Tensor) -> int:
    return geometry.untyped_storage()._cdata
