"""Adam on many tensors at once, as an op of PyTorch: schema, checks, reference, kernels.

`torch.ops.zeropp.adam` updates parameters, moments and 16-bit copies in one pass over memory, with
the kernels of csrc/adam/ where they were built. `reference` is the same in PyTorch, operation by
operation, and gives the same bits on CPUs.
"""

import ctypes
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from zeropp.native.kernels import cpu_library, cuda_library
from zeropp.native.library import ADDRESS, INT, LibraryError
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
_log = logging.getLogger("zeropp")


class Scalars(ctypes.Structure):
    """What all elements share, in fp32; AdamScalars in csrc/adam/math.h."""

    _fields_ = (
        ("keep", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("mean_rate", ctypes.c_float),
        ("square_keep", ctypes.c_float),
        ("square_rate", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("keys", ctypes.c_uint32 * 2),
    )


class _Call(ctypes.Structure):
    """AdamCall in csrc/adam/call.h."""

    _fields_ = (
        ("tensors", ADDRESS),
        ("count", INT),
        ("gradient_type", INT),
        ("copy_type", INT),
        ("moment_type", INT),
        ("factor", ADDRESS),
        ("scalars", Scalars),
    )


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Adam's hyperparameters for one step.

    step: t, including this step. decoupled: the decay shrinks the weights (AdamW) instead of being
    added to the gradient. corrected: the moments are divided by 1 - beta^t. seed: with `step` and
    the position of an element in the call, it determines the random bits that round bf16 moments.
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
        """The numbers that kernels take: computed in fp64, rounded once."""
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
    """What Adam reads and writes: as many tensors of each; the list of copies may be empty."""

    parameters: Sequence[Tensor]  # fp32
    gradients: Sequence[Tensor]  # bf16, fp16 or fp32, all the same
    means: Sequence[Tensor]  # fp32; on CPUs also bf16, with stochastic rounding
    squares: Sequence[Tensor]  # like the means
    copies: Sequence[Tensor]  # bf16 or fp16, all the same


Backend = Callable[[Arrays, Tensor | None, Scalars], None]
Launch = Callable[[int, torch.device], None]  # of a kernel, with the address of a `_Call`


def adam(arrays: Arrays, factor: Tensor | None, settings: AdamSettings) -> None:
    """Update all parameters and moments, and write the parameters' 16-bit copies, in place.

    Tensors are contiguous, those of one parameter have the same shape, and all are on one device.
    Gradients are multiplied by `factor`, one fp32 number on that device. If it is not finite,
    nothing is written; the host does not wait to know. Raises TypeError or ValueError for other
    tensors.
    """
    torch.ops.zeropp.adam(*arrays, factor, **vars(settings))


def reference(arrays: Arrays, factor: Tensor | None, scalars: Scalars) -> None:
    """`adam` in plain PyTorch; each operation rounds as in csrc/adam/math.h."""
    is_finite = None if factor is None else factor.reshape(()).isfinite()
    copies = arrays.copies or [None] * len(arrays.parameters)
    position = 0
    for parameter, gradient, mean, square, copy in zip(*arrays[:4], copies, strict=True):
        updated = _updated(parameter, gradient, mean, square, factor, scalars)
        if mean.dtype == torch.bfloat16:
            random = random_words(scalars.keys, position, parameter)
            updated = updated[0], *_rounded_moments(*updated[1:], random)
        for tensor, new in zip((parameter, mean, square), updated, strict=True):
            _write(new, tensor, is_finite)
        position += parameter.numel()
        if copy is not None:
            _write(parameter.to(copy.dtype), copy, is_finite)


def kernel_for(device: torch.device) -> Launch | None:
    """The compiled kernel for a device; `None` if only the reference runs there."""
    try:
        if device.type == "cpu":
            cpu_library()
            return _launch_on_cpu
        if device.type == "cuda":
            cuda_library()
            return _launch_on_cuda
    except LibraryError:
        return None
    return None


def _launch_on_cpu(call: int, device: torch.device) -> None:
    cpu_library().zpp_adam(call, torch.get_num_threads())


def _launch_on_cuda(call: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        cuda_library().zpp_adam(call, device.index, stream)


def run_kernel(launch: Launch, arrays: Arrays, factor: Tensor | None, scalars: Scalars) -> None:
    """`adam` by a compiled kernel, on tensors that have been checked."""
    numbers = []
    copies = arrays.copies or [None] * len(arrays.parameters)
    for parameter, gradient, mean, square, copy in zip(*arrays[:4], copies, strict=True):
        if size := parameter.numel():
            numbers += [each.data_ptr() for each in (gradient, parameter, mean, square)]
            numbers += [0 if copy is None else copy.data_ptr(), size]
    if not numbers:
        return
    table = (INT * len(numbers))(*numbers)
    call = _Call(
        tensors=ctypes.addressof(table),
        count=len(numbers) // 6,
        gradient_type=FLOATS.index(arrays.gradients[0].dtype),
        copy_type=FLOATS.index(arrays.copies[0].dtype) if arrays.copies else 0,
        moment_type=FLOATS.index(arrays.means[0].dtype),
        factor=None if factor is None else factor.data_ptr(),
        scalars=scalars,
    )
    launch(ctypes.addressof(call), arrays.parameters[0].device)


def check(arrays: Arrays, factor: Tensor | None) -> None:
    """Raise TypeError or ValueError for tensors that `adam` cannot take."""
    count = len(arrays.parameters)
    for name, tensors in arrays._asdict().items():
        if len(tensors) != count and (tensors or name != "copies"):
            raise ValueError(f"{len(tensors)} {name} for {count} parameters: give one each")
    if not count:
        return
    device = arrays.parameters[0].device
    _check_types("gradients", arrays.gradients, FLOATS)
    _check_types("copies", arrays.copies, HALVES)
    _check_types("parameters", arrays.parameters, (torch.float32,))
    _check_types("moments", [*arrays.means, *arrays.squares], MOMENTS[: 1 + (device.type == "cpu")])
    for name, tensors in arrays._asdict().items():
        for tensor, parameter in zip(tensors, arrays.parameters, strict=bool(tensors)):
            _check_tensor(name, tensor, parameter.shape, device)
    if factor is not None:
        if factor.dtype != torch.float32 or factor.numel() != 1 or factor.device != device:
            raise ValueError(
                f"factor has {factor.numel()} of {factor.dtype} on {factor.device}; give one "
                f"float32 on {device}"
            )


def _check_types(name: str, tensors: Sequence[Tensor], allowed: Sequence[torch.dtype]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes.issubset(allowed):
        actual = " and ".join(sorted(str(dtype) for dtype in dtypes))
        expected = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} are {actual}; give {expected}, all alike")


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, device: torch.device) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"one of {name} has shape {tuple(tensor.shape)}, its parameter {tuple(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"one of {name} is on {tensor.device}, others on {device}; use one device")
    if not tensor.is_contiguous():
        raise ValueError(f"one of {name} has strides {tensor.stride()}; give contiguous tensors")


def _updated(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    factor: Tensor | None,
    scalars: Scalars,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new (parameter, mean, square); torch's lerp, addcmul and addcdiv round differently."""
    gradient = gradient.float()
    if factor is not None:
        gradient = gradient * factor.reshape(())
    before = parameter * scalars.keep
    if scalars.decay:
        gradient = gradient + scalars.decay * before
    mean, square = mean.float(), square.float()
    mean = mean + scalars.mean_rate * (gradient - mean)
    square = scalars.square_keep * square + scalars.square_rate * gradient * gradient
    # PyTorch's fp32 square root may be an ulp off on CPUs. One in fp64 rounds correctly: no root of
    # an fp32 number is closer than 4 fp64 ulps to a tie.
    divisor = square.double().sqrt().float() * scalars.root_correction + scalars.eps
    return before - scalars.step_size * (mean / divisor), mean, square


def random_words(keys: Sequence[int], position: int, like: Tensor) -> Tensor:
    """32 random bits, int64, for each element of `like`, the first of which is at `position`."""
    words = torch.arange(position, position + like.numel(), device=like.device) & WORD
    words = words ^ keys[0]
    words = (((words ^ words >> 16) * 0x7FEB352D) & WORD) ^ keys[1]
    words = ((words ^ words >> 15) * 0x846CA68B) & WORD
    return (words ^ words >> 16).view(like.shape)


def _keys(seed: int, step: int) -> Iterator[int]:
    """Two words; about half of their bits change with another seed or step.

    G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (SplitMix64).
    """
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = (word ^ word >> shift) * factor % 2**64
    yield word & WORD
    yield word >> 32


def _rounded_moments(mean: Tensor, square: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    return _round_stochastically(mean, random & 0xFFFF), _round_stochastically(square, random >> 16)


def _round_stochastically(value: Tensor, random: Tensor) -> Tensor:
    """Round to bf16: up with a probability of the distance from below; `random` has 16 bits."""
    bits = value.contiguous().view(torch.int32).long() & WORD
    upper = (bits + random >> 16 << 16) & WORD
    signed = torch.where(upper >= 2**31, upper - 2**32, upper).int()
    rounded = signed.view(torch.float32).bfloat16()
    return torch.where(value.isnan(), value.bfloat16(), rounded)


def _write(new: Tensor, tensor: Tensor, condition: Tensor | None) -> None:
    """Write `new` to `tensor` if `condition`, a boolean on the same device, is true or None."""
    tensor.copy_(new if condition is None else torch.where(condition, new, tensor))


@cache
def _backend(device_type: str) -> Backend:
    """What runs on a type of device; says so once, at INFO, if it is slow."""
    launch = kernel_for(torch.device(device_type))
    if launch is None:
        _log.info("zeropp's Adam on %s tensors runs in plain PyTorch, which is slow", device_type)
        return reference
    return partial(run_kernel, launch)


def _implementation(backend: Callable[[], Backend]) -> Callable[..., None]:
    def implementation(*tensors: Sequence[Tensor] | Tensor | None, **settings: float) -> None:
        arrays, factor = Arrays(*tensors[:-1]), tensors[-1]
        check(arrays, factor)
        backend()(arrays, factor, AdamSettings(**settings).scalars())

    return implementation


def _check_only(*tensors: Sequence[Tensor] | Tensor | None, **settings: float) -> None:
    """The fake kernel: the op returns nothing."""
    check(Arrays(*tensors[:-1]), tensors[-1])


def _register() -> None:
    LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{NAME}", _check_only, lib=LIBRARY)
    LIBRARY.impl(NAME, _implementation(lambda: reference), "CompositeExplicitAutograd")
    for device_type in ("cpu", "cuda"):
        LIBRARY.impl(NAME, _implementation(partial(_backend, device_type)), device_type.upper())


_register()
