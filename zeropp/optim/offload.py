"""ZeRO-Offload: this rank's fp32 weights, and with them gradients and moments, in host memory.

    device                                   host
    16-bit weights   --- once ------------>  fp32 weights, the masters: what the optimizer holds
    mean gradients   --- as they are made -> fp32 gradients
    16-bit weights   <-- in the step ------  fp32 weights, rounded

A part of the masters may stay on the device (`ratio`), with all that is theirs. On a CPU, device
and host are one: the same steps, without the copies. For an update beside the next step (`delayed`)
nothing is shared even there, and there are two sets of gradients: one is read, the other written.
Source: ZeRO-Offload (Ren et al. 2021).
"""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.optim.step import local_part
from zeropp.ranks.coordination import fail_together
from zeropp.ranks.host_memory import free_bytes, pinned_bytes
from zeropp.ranks.topology import Environment
from zeropp.sharding.sharding import Sharding
from zeropp.sharding.weight_changes import WeightsWritten

BUCKET = 2**25  # elements: one is sent to the device while the next is updated
HOST = torch.device("cpu")
WIDE, MOMENTS = 4, 8  # bytes of a weight or gradient in fp32; of Adam's two moments
log = logging.getLogger("zeropp")


@dataclass(frozen=True, kw_only=True)
class Master:
    """One parameter's fp32 weight and gradients, this rank's part of them, and how it is sent.

    `gradients` are two where an update may read one while the next is made, else one. `rounded` is
    written by the optimizer: the parameter's own memory where an update may write there, else
    memory beside the master; None where nothing is rounded.
    """

    parameter: nn.Parameter
    weight: nn.Parameter
    gradients: tuple[Tensor, ...]
    rounded: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.gradients[0].device


def places(
    parameters: Sequence[nn.Parameter], ratio: float, device: torch.device
) -> Iterator[torch.device]:
    """The host for the first parameters that fit into `ratio` of all elements, else the device."""
    sizes = [parameter.numel() for parameter in parameters]
    left = math.ceil(ratio * sum(sizes))
    for size in sizes:
        fits = size <= left
        left -= size if fits else 0
        yield HOST if fits else device


class Offload:
    """The masters of a sharded model's trainable parameters; make it before the first forward pass.

    ratio: the part of the weights, by number, whose masters are on the host, whole parameters, so
    at most that. delayed: masters may be updated while the model is used; see `turn` and
    `before_access`. Raises InputError for a model that has run, and where the host has too little
    memory.
    """

    def __init__(
        self,
        sharding: Sharding,
        device: torch.device,
        *,
        ratio: float = 1.0,
        pin_memory: bool,
        delayed: bool = False,
    ) -> None:
        self._require_fresh(sharding)
        self._device, self._dtype = device, sharding.compute_dtype
        self._pinned = pin_memory and device != HOST
        self._delayed, self._turn = delayed, 0
        self._before_access: Callable[[], None] = lambda: None
        self._events: list[torch.Event] = []
        self._late: list[tuple[Tensor, Tensor]] = []  # gradient, more of it
        trained = [
            parameter for parameter in sharding.model.parameters() if parameter.requires_grad
        ]
        where = dict(zip(trained, places(trained, ratio, device), strict=True))
        with fail_together():  # and before any rank takes what another still counts as free
            self._require_memory([one for one in trained if where[one] == HOST], sharding)
        self._masters = {one: self._master(one, where[one]) for one in trained}
        self._by_weight = {master.weight: master for master in self._masters.values()}
        self._listen(sharding)

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The model's parameters -> what the optimizer holds in their places."""
        return {parameter: one.weight for parameter, one in self._masters.items()}

    @property
    def copies(self) -> Mapping[nn.Parameter, Tensor]:
        """Masters -> 16-bit tensors that the optimizer writes along with them."""
        return {
            master.weight: master.rounded
            for master in self._masters.values()
            if master.rounded is not None
        }

    def buckets(self, masters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Masters of one device each, about `BUCKET` elements."""
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for master in masters:
            by_device.setdefault(local_part(master).device, []).append(master)
        for alike in by_device.values():
            bucket, size = [], 0
            for one in alike:
                bucket.append(one)
                size += local_part(one).numel()
                if size >= BUCKET:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket

    def send(self, masters: Iterable[nn.Parameter]) -> None:
        """Queue the copies of updated masters to their parameters, those `rounded` already."""
        for weight in masters:
            one = self._by_weight[weight]
            source = local_part(weight) if one.rounded is None else one.rounded
            target = local_part(one.parameter)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source, non_blocking=True)

    def turn(self) -> None:
        """Leave gradients and what was sent to an update; those to come go to the other set."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._turn = 1 - self._turn

    def before_access(self, settle: Callable[[], None]) -> None:
        """Call `settle` before masters are taken from parameters that others have written."""
        self._before_access = settle

    def write(self, *, send: bool = True) -> None:
        """Round all masters anew and send them: they were changed by others than the optimizer."""
        with torch.no_grad():
            for master in self._masters.values():
                if master.rounded is not None:
                    master.rounded.copy_(local_part(master.weight))
            if send:
                self.send(self._by_weight)

    def read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take masters from parameters that others have written."""
        self._before_access()
        with torch.no_grad():
            for parameter in parameters:
                if (one := self._masters.get(parameter)) is not None:
                    for copy in (local_part(one.weight), one.rounded):
                        if copy is not None:
                            copy.copy_(local_part(parameter))

    def wait(self) -> None:
        """Until all gradients are where the optimizer reads them."""
        for event in self._events:
            event.synchronize()
        self._events.clear()
        self._add_late()

    def _require_fresh(self, sharding: Sharding) -> None:
        if any(fsdp.has_run(unit) for unit in sharding.units):
            raise InputError(
                "the optimizer of a model that has run already cannot be offloaded: make it before "
                "the first forward pass"
            )

    def _require_memory(self, offloaded: Sequence[nn.Parameter], sharding: Sharding) -> None:
        """Say how much host memory the masters take; raise InputError where there is less."""
        sizes = [local_part(one).numel() for one in offloaded]
        apart = self._delayed or self._device != HOST
        staged = self._dtype.itemsize if apart and self._dtype != torch.float32 else 0
        ours = WIDE, WIDE, WIDE * self._delayed, staged  # master, gradients, rounded
        taken = pinned_bytes if self._pinned else int
        here = Environment.read()
        ranks = min(sharding.num_ranks, -(-here.world_size // here.machines))
        needed = sum(MOMENTS * size + sum(taken(each * size) for each in ours) for size in sizes)
        free = free_bytes()
        log.info(
            "offload: weights, gradients and moments of %s parameters of this rank in host memory, "
            "%.2f GiB%s", f"{sum(sizes):,}", needed / 2**30, ", pinned" if self._pinned else "",
        )  # fmt: skip
        if free is not None and needed * ranks > free:
            raise InputError(
                f"offload_optimizer needs {needed * ranks / 2**30:.1f} GiB of host memory for the "
                f"{ranks} ranks of this machine, and {free / 2**30:.1f} GiB are free: use more "
                "machines, or offload_optimizer.ratio below 1"
            )

    def _master(self, parameter: nn.Parameter, place: torch.device) -> Master:
        local = local_part(parameter.detach())
        own, apart = local, place != self._device or self._delayed
        if self._dtype != torch.float32 or apart:
            own = self._empty(local, place, torch.float32)
            own.copy_(local)
            _become(parameter, local.to(self._device, self._dtype))
        rounded = None
        if self._dtype != torch.float32:
            rounded = local_part(parameter.detach())
            if apart:
                rounded = self._empty(local, place, self._dtype)
        sets = 2 if self._delayed else 1
        return Master(
            parameter=parameter, weight=nn.Parameter(_like(parameter, own)), rounded=rounded,
            gradients=tuple(self._empty(local, place, torch.float32) for _ in range(sets)),
        )  # fmt: skip

    def _empty(self, like: Tensor, place: torch.device, dtype: torch.dtype) -> Tensor:
        facts = {"dtype": dtype, "device": place}
        if self._pinned and place == HOST:
            try:
                return torch.empty(like.shape, **facts, pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                log.warning(
                    "offload: the system gives no page-locked memory (%s); the rest is pageable: "
                    "copies then wait for each other and for the computation",
                    str(error).splitlines()[0],
                )
        return torch.empty(like.shape, **facts)

    def _listen(self, sharding: Sharding) -> None:
        for unit in sharding.units:
            fsdp.take_gradients(unit, self._take)
        if not sharding.units:
            for one in self._masters:
                one.register_post_accumulate_grad_hook(self._take_whole)
        for module in sharding.model.modules():
            module.register_load_state_dict_post_hook(self._loaded)
        named = sharding.model.named_parameters()
        frozen = {name: one for name, one in named if not one.requires_grad}
        sharding.model.register_forward_pre_hook(partial(_require_frozen, frozen))
        known = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if isinstance(optimizer, WeightsWritten) and (offload := known()):
                offload.read(optimizer.param_groups[0]["params"])

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def _loaded(self, module: nn.Module, _: object) -> None:
        """A state was loaded into this module; those inside it have hooks of their own."""
        self.read(module.parameters(recurse=False))

    def _take_whole(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        self._take(parameter, gradient)

    def _take(self, parameter: nn.Parameter, mean: Tensor) -> None:
        """A reduction's result: the gradient, or more of it, on its way to the master."""
        one = self._masters[parameter]
        gradient = one.gradients[self._turn]
        first = one.weight.grad is None
        if first:
            one.weight.grad = _like(one.weight, gradient)
        if one.device == mean.device:
            gradient.copy_(mean) if first else gradient.add_(mean)
            return
        arriving = gradient if first else self._empty(mean, one.device, torch.float32)
        arriving.copy_(mean, non_blocking=True)
        stream = torch.cuda.current_stream(mean.device)
        mean.record_stream(stream)
        self._events.append(stream.record_event())
        if not first:
            if not self._late:
                fsdp.after_backward(self.wait)
            self._late.append((gradient, arriving))

    def _add_late(self) -> None:
        for gradient, arrived in self._late:
            gradient.add_(arrived)
        self._late.clear()


def _require_frozen(frozen: Mapping[str, nn.Parameter], *_: object) -> None:
    """Raise InputError for a weight without a master that is to be trained after all."""
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise InputError(
                f"{name} requires gradients, and it was frozen when the optimizer was offloaded: "
                "let it be trained from the beginning and freeze it then, or leave "
                "offload_optimizer out"
            )


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor that is sharded as `parameter`, if that is."""
    return fsdp.shard_like(parameter, local) if isinstance(parameter, DTensor) else local


def _become(parameter: nn.Parameter, local: Tensor) -> None:
    """Let the parameter hold `local`; it stays the same object."""
    if not isinstance(parameter, DTensor):  # the model's own, which may have weak references
        parameter.data = local
        return
    sharded = fsdp.shard_like(parameter, local)
    renewed = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, renewed)
