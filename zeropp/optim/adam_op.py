"""Adam on many tensors at once, as an op of PyTorch: schema, checks, arithmetic, what runs where.

`torch.ops.zeropp.adam` changes parameters, moments and 16-bit copies in one pass over memory. The
kernels of csrc/ do it where they were built; `reference` is the same in PyTorch, operation by
operation, and gives the same bits on CPUs.
"""

import ctypes
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from zeropp.quant import cpu as native
from zeropp.quant import cuda
from zeropp.quant.library import ADDRESS, NUMBER, Kernels
from zeropp.quant.ops import LIBRARY, NAMESPACE
from zeropp.quant.packing import FLOATS

NAME = "adam"
SCHEMA = (
    "adam(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] squares, "
    "Tensor(d!)[] copies, Tensor? factor, *, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, bool decoupled, bool corrected, int seed) -> ()"
)
HALVES = (torch.bfloat16, torch.float16)
MOMENTS = (torch.float32, torch.bfloat16)
WORD = 2**32 - 1
_TYPES = MappingProxyType({dtype: number for number, dtype in enumerate(FLOATS)})  # csrc/format.h
_log = logging.getLogger("zeropp")


class Scalars(ctypes.Structure):
    """What all elements share, in fp32, as csrc/adam_math.h names it."""

    _fields_ = (
        *(
            (name, ctypes.c_float)
            for name in (
                "keep", "decay", "mean_rate", "square_keep", "square_rate", "root_correction",
                "eps", "step_size",
            )
        ),
        ("keys", ctypes.c_uint32 * 2),
    )  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = (
        ("tensors", ADDRESS), ("count", NUMBER), ("gradient_type", NUMBER), ("copy_type", NUMBER),
        ("moment_type", NUMBER), ("factor", ADDRESS), ("scalars", Scalars),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Adam's numbers for one step.

    step: t, this one included. decoupled: the decay shrinks the weights (AdamW) instead of being
    added to the gradient. corrected: the moments are divided by 1 - beta^t. seed: of the random
    bits that round moments in bf16, with `step` and the element's place among the call's.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    corrected: bool = True
    seed: int = 0

    def scalars(self) -> Scalars:
        """Computed in fp64, rounded once."""
        mean, square = 1.0, 1.0
        if self.corrected:
            mean, square = 1.0 - self.beta1**self.step, 1.0 - self.beta2**self.step
        return Scalars(
            keep=1.0 - self.lr * self.weight_decay if self.decoupled else 1.0,
            decay=0.0 if self.decoupled else self.weight_decay,
            mean_rate=1.0 - self.beta1,
            square_keep=self.beta2,
            square_rate=1.0 - self.beta2,
            root_correction=1.0 / math.sqrt(square),
            eps=self.eps,
            step_size=self.lr / mean,
            keys=tuple(_keys(self.seed, self.step)),
        )


class Arrays(NamedTuple):
    """What Adam reads and writes: as many tensors of each, the copies' list may be empty."""

    parameters: Sequence[Tensor]  # fp32
    gradients: Sequence[Tensor]  # bf16, fp16 or fp32, all alike
    means: Sequence[Tensor]  # fp32, on CPUs also bf16: rounded up or down by chance
    squares: Sequence[Tensor]  # as the means
    copies: Sequence[Tensor]  # bf16 or fp16, all alike


Backend = Callable[[Arrays, Tensor | None, Scalars], None]


def adam(arrays: Arrays, factor: Tensor | None, settings: AdamSettings) -> None:
    """Update all parameters and moments, and write the parameters' 16-bit copies, in place.

    Tensors are contiguous, those of one parameter of one shape, all on one device. Gradients are
    multiplied by `factor`, one fp32 number on that device; where it is not finite, nothing is
    written, and nobody waits to know. Raises TypeError or ValueError for other tensors.
    """
    torch.ops.zeropp.adam(*arrays, factor, **vars(settings))


def reference(arrays: Arrays, factor: Tensor | None, scalars: Scalars) -> None:
    """`adam` in plain PyTorch; each operation rounds as that of csrc/adam_math.h."""
    written = None if factor is None else factor.reshape(()).isfinite()
    copies = arrays.copies or [None] * len(arrays.parameters)
    place = 0
    for *one, copy in zip(*arrays[:4], copies, strict=True):
        parameter, _, mean, square = one
        fresh = _updated(*one, factor, scalars)
        if mean.dtype == torch.bfloat16:
            fresh = fresh[0], *_drawn(*fresh[1:], random_words(scalars.keys, place, parameter))
        for tensor, renewed in zip((parameter, mean, square), fresh, strict=True):
            _write(renewed, tensor, written)
        place += parameter.numel()
        if copy is not None:
            _write(parameter.to(copy.dtype), copy, written)


def kernels_on(device: torch.device) -> Kernels | None:
    """The compiled kernels that have Adam for a device's kind; `None`: PyTorch stands in."""
    found = {"cpu": native.native, "cuda": cuda.cuda}.get(device.type, lambda: None)()
    return found if found and found.has(NAME) else None


def run_kernels(kernels: Kernels, arrays: Arrays, factor: Tensor | None, scalars: Scalars) -> None:
    """`adam` by a library, on tensors that have been checked."""
    numbers = []
    copies = arrays.copies or [None] * len(arrays.parameters)
    for parameter, gradient, mean, square, copy in zip(*arrays[:4], copies, strict=True):
        if size := parameter.numel():
            numbers += [
                gradient.data_ptr(), parameter.data_ptr(), mean.data_ptr(), square.data_ptr(),
                0 if copy is None else copy.data_ptr(), size,
            ]  # fmt: skip
    if not numbers:
        return
    table = (NUMBER * len(numbers))(*numbers)
    call = _Call(
        tensors=ctypes.addressof(table), count=len(numbers) // 6,
        gradient_type=_TYPES[arrays.gradients[0].dtype],
        copy_type=_TYPES[arrays.copies[0].dtype] if arrays.copies else 0,
        moment_type=_TYPES[arrays.means[0].dtype],
        factor=None if factor is None else factor.data_ptr(), scalars=scalars,
    )  # fmt: skip
    kernels.run(NAME, arrays.parameters[0].device, ctypes.addressof(call))


def check(arrays: Arrays, factor: Tensor | None) -> None:
    """Raise TypeError or ValueError for tensors that `adam` cannot take."""
    count = len(arrays.parameters)
    for name, tensors in arrays._asdict().items():
        if len(tensors) != count and (tensors or name != "copies"):
            raise ValueError(f"{len(tensors)} {name} for {count} parameters: give as many")
    if not count:
        return
    device = arrays.parameters[0].device
    _check_types("gradients", arrays.gradients, FLOATS)
    _check_types("copies", arrays.copies, HALVES)
    _check_types("parameters", arrays.parameters, (torch.float32,))
    _check_types("moments", [*arrays.means, *arrays.squares], MOMENTS[: 1 + (device.type == "cpu")])
    for name, tensors in arrays._asdict().items():
        for tensor, parameter in zip(tensors, arrays.parameters, strict=bool(tensors)):
            _check_one(name, tensor, parameter.shape, device)
    if factor is not None:
        if factor.dtype != torch.float32 or factor.numel() != 1 or factor.device != device:
            raise ValueError(
                f"factor has {factor.numel()} of {factor.dtype} on {factor.device}; give one "
                f"float32 on {device}"
            )


def _check_types(name: str, tensors: Sequence[Tensor], allowed: Sequence[torch.dtype]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes.issubset(allowed):
        given = " and ".join(sorted(str(one) for one in dtypes))
        wanted = " or ".join(str(one) for one in allowed)
        raise TypeError(f"{name} are {given}; give {wanted}, all alike")


def _check_one(name: str, tensor: Tensor, shape: torch.Size, device: torch.device) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"one of {name} has shape {tuple(tensor.shape)}, its parameter {tuple(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"one of {name} is on {tensor.device}, others on {device}; use one device")
    if not tensor.is_contiguous():
        raise ValueError(f"one of {name} has strides {tensor.stride()}; give contiguous tensors")


def _updated(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, factor: Tensor | None,
    by: Scalars,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The new (parameter, mean, square); torch's lerp, addcmul and addcdiv may round otherwise."""
    pull = gradient.float()
    if factor is not None:
        pull = pull * factor.reshape(())
    before = parameter * by.keep
    if by.decay:
        pull = pull + by.decay * before
    mean, square = mean.float(), square.float()
    mean = mean + by.mean_rate * (pull - mean)
    square = by.square_keep * square + by.square_rate * pull * pull
    # PyTorch's root of fp32 may be an ulp off on CPUs. One in fp64 rounds right: no root of an fp32
    # number is nearer than 4 of fp64's ulps to a tie.
    divisor = square.double().sqrt().float() * by.root_correction + by.eps
    return before - by.step_size * (mean / divisor), mean, square


def random_words(keys: Sequence[int], place: int, like: Tensor) -> Tensor:
    """32 random bits, int64, for each element of `like`, the first of which is at `place`."""
    words = torch.arange(place, place + like.numel(), device=like.device) & WORD
    words = words ^ keys[0]
    words = (((words ^ words >> 16) * 0x7FEB352D) & WORD) ^ keys[1]
    words = ((words ^ words >> 15) * 0x846CA68B) & WORD
    return (words ^ words >> 16).view(like.shape)


def _keys(seed: int, step: int) -> Iterator[int]:
    """Two words that differ in half of their bits for each other seed or step.

    G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (SplitMix64).
    """
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = (word ^ word >> shift) * factor % 2**64
    yield word & WORD
    yield word >> 32


def _drawn(mean: Tensor, square: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    return _drawn_bf16(mean, random & 0xFFFF), _drawn_bf16(square, random >> 16)


def _drawn_bf16(value: Tensor, random: Tensor) -> Tensor:
    """Up or down to a number of bf16, the nearer the likelier; `random` has 16 bits."""
    bits = value.contiguous().view(torch.int32).long() & WORD
    upper = (bits + random >> 16 << 16) & WORD
    signed = torch.where(upper >= 2**31, upper - 2**32, upper).int()
    rounded = signed.view(torch.float32).bfloat16()
    return torch.where(value.isnan(), value.bfloat16(), rounded)


def _write(fresh: Tensor, to: Tensor, written: Tensor | None) -> None:
    to.copy_(fresh if written is None else torch.where(written, fresh, to))


def anywhere() -> Backend:
    """The backend of every device that has no other."""
    return reference


def on_cpu() -> Backend:
    """The backend of the CPU."""
    return _backend("cpu")


def on_cuda() -> Backend:
    """The backend of NVIDIA GPUs."""
    return _backend("cuda")


@cache
def _backend(kind: str) -> Backend:
    """What runs on a kind of device; says so once, at INFO, if it is slow."""
    kernels = kernels_on(torch.device(kind))
    if kernels is None:
        _log.info("our Adam on %s tensors runs in plain PyTorch, which is slow", kind)
        return reference
    return lambda *arguments: run_kernels(kernels, *arguments)


def _implementation(backend: Callable[[], Backend]) -> Callable[..., None]:
    def implementation(*tensors: Sequence[Tensor] | Tensor | None, **settings: float) -> None:
        arrays, factor = Arrays(*tensors[:-1]), tensors[-1]
        check(arrays, factor)
        backend()(arrays, factor, AdamSettings(**settings).scalars())

    return implementation


def _shape(*tensors: Sequence[Tensor] | Tensor | None, **settings: float) -> None:
    check(Arrays(*tensors[:-1]), tensors[-1])


def _register() -> None:
    LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{NAME}", _shape, lib=LIBRARY)
    backends = {"CompositeExplicitAutograd": anywhere, "CPU": on_cpu, "CUDA": on_cuda}
    for key, backend in backends.items():
        LIBRARY.impl(NAME, _implementation(backend), key)


_register()
