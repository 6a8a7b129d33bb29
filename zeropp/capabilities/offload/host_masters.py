"""ZeRO-Offload: this rank's fp32 weights, gradients and moments in host memory.

    device                                     host
    16-bit weights   --- once -------------->  fp32 weights, the masters that the optimizer holds
    mean gradients   --- as they are reduced > fp32 gradients
    16-bit weights   <-- in the step --------  fp32 weights, rounded

Some of the masters may stay on the device (`ratio`), with their gradients and moments. On a CPU,
device and host are the same: the steps are the same without the copies. If an update runs during
the next step (`delayed`), device and host share nothing even there, and there are two sets of
gradients: the update reads one while backward writes the other.

Source: ZeRO-Offload (Ren et al. 2021).
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.capabilities.offload.page_locked import page_locked
from zeropp.errors import InputError
from zeropp.fsdp_adapter import local_part
from zeropp.ranks.coordination import fail_together
from zeropp.ranks.host_memory import free_bytes
from zeropp.ranks.topology import Environment
from zeropp.settings.sections import FORMATS
from zeropp.sharding.shard import HOST, master_devices
from zeropp.sharding.sharding import Sharding
from zeropp.wire.cross_stream import record_use
from zeropp.wire.shard_holders import EVERYWHERE, ShardHolder, add_holder

BUCKET = 2**25  # elements; one bucket is sent to the device while the next is updated
FP32_BYTES, MOMENT_BYTES = 4, 8  # of Adam's two moments
log = logging.getLogger("zeropp")


@dataclass(frozen=True, kw_only=True)
class Master:
    """This rank's shards of one parameter's fp32 weight and gradients.

    There are two `gradients` if an update may read one while backward writes the other, else one.
    The optimizer writes the rounded weight to `rounded`: the parameter's own memory if an update
    may write there, else memory beside the master; None if nothing is rounded.
    """

    parameter: nn.Parameter
    weight: nn.Parameter
    gradients: tuple[Tensor, ...]
    rounded: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.gradients[0].device


def trained_parameters(sharding: Sharding) -> list[nn.Parameter]:
    return [parameter for parameter in sharding.model.parameters() if parameter.requires_grad]


def require_host_memory(
    sharding: Sharding,
    device: torch.device,
    *,
    ratio: float,
    pin_memory: bool,
    delayed: bool,
    gradient_type: str,
    adds_gradients: bool = False,
) -> None:
    """Raise InputError if the host lacks memory for what `Offload` takes there; all ranks call it.

    Weights that are there count once: they become masters, or are freed. adds_gradients: those of
    several micro-batches are added on the host.
    """
    stays = device == HOST or any(map(fsdp.is_on_host, sharding.units))
    width, is_16_bit = sharding.compute_dtype.itemsize, sharding.compute_dtype != torch.float32
    sets = 1 + delayed + (adds_gradients and device != HOST)
    gradients = sets * getattr(torch, FORMATS[gradient_type]).itemsize
    # rounded weight, the model's own where that is another one
    copies = width * is_16_bit + width * (delayed and stays)
    per_element = FP32_BYTES + MOMENT_BYTES + gradients + copies
    trained = trained_parameters(sharding)
    shards = [local_part(parameter) for parameter in trained]

    def elements_at(ratio: float) -> int:
        places = master_devices(trained, ratio, device)
        return sum(each.numel() for each, at in zip(shards, places, strict=True) if at == HOST)

    needed = per_element * (elements := elements_at(ratio))
    if not any(each.is_meta for each in trained):
        log.info(
            f"offload: weights, gradients and moments of {elements:,} parameters of this rank in "
            f"host memory, {needed / 2**30:.2f} GiB" + ", pinned" * (pin_memory and device != HOST)
        )
    environment, free = Environment.read(), free_bytes()
    ranks = min(sharding.grid.num_ranks, -(-environment.world_size // environment.machines))
    there = sum(each.nbytes for each in shards if each.device == HOST)
    missing = ranks * max(0, needed - there)
    with fail_together():  # before any rank allocates what another still counts as free
        if free is not None and missing > free:
            most, ratios = free / ranks + there, [each / 100 for each in range(99, -1, -1)]
            fits = next((each for each in ratios if per_element * elements_at(each) <= most), None)
            less = "" if stays or fits is None else f", or offload_optimizer.ratio = {fits}"
            raise InputError(
                f"offload_optimizer needs {ranks * needed / 2**30:.1f} GiB of host memory for the "
                f"{ranks} ranks of this machine, {missing / 2**30:.1f} more than now, and "
                f"{free / 2**30:.1f} are free: use more machines{less}"
            )


class Offload(ShardHolder):
    """The masters of a sharded model's trainable parameters; create it before the first forward.

    device: where the model computes; its weights are moved there, unless FSDP2 keeps them on the
    host. ratio: at most this share of all elements has its masters on the host; parameters are not
    split. delayed: masters may be updated while the model is used; see `swap_gradients` and
    `before_access`. gradient_type: "fp32", "fp16" or "bf16". Raises InputError for a model that has
    run, and for too little host memory.
    """

    def __init__(
        self,
        sharding: Sharding,
        device: torch.device,
        *,
        ratio: float = 1.0,
        pin_memory: bool,
        delayed: bool = False,
        gradient_type: str = "fp32",
    ) -> None:
        self._require_unused(sharding)
        self._compute_device, self._dtype = device, sharding.compute_dtype
        self._device = HOST if any(map(fsdp.is_on_host, sharding.units)) else device  # of weights
        self._pinned = pin_memory and device != HOST
        self._delayed, self._gradient_set = delayed, 0
        self._gradient_dtype = getattr(torch, FORMATS[gradient_type])
        self._before_access: Callable[[], None] = lambda: None
        self._events: list[torch.Event] = []
        # By backward pass: (master, gradient, what is to be added to it when the pass ends).
        self._late: dict[int, list[tuple[Master, Tensor, Tensor]]] = {}
        self._addends: dict[nn.Parameter, Tensor] = {}  # of masters, for later passes
        trained = trained_parameters(sharding)
        options = dict(pin_memory=pin_memory, delayed=delayed, gradient_type=gradient_type)
        require_host_memory(sharding, device, ratio=ratio, **options)
        devices = dict(zip(trained, master_devices(trained, ratio, device), strict=True))
        weights: dict[nn.Parameter, Tensor | None] = {}
        for unit in sharding.units:  # one after the other, so that only one is there twice
            for parameter in filter(devices.__contains__, fsdp.shards(unit)):
                weights[parameter] = self._make_weight(parameter, devices[parameter])
            fsdp.refresh_parameters([unit])  # pads and pins the shards, in memory of its own
        for parameter in devices.keys() - weights:
            weights[parameter] = self._make_weight(parameter, devices[parameter])
        self._masters = {
            parameter: self._make_master(parameter, weights[parameter], devices[parameter])
            for parameter in trained
        }
        self._by_weight = {master.weight: master for master in self._masters.values()}
        self._listen(sharding)

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The model's parameters -> the masters that the optimizer holds instead."""
        return {parameter: master.weight for parameter, master in self._masters.items()}

    @property
    def copies(self) -> Mapping[nn.Parameter, Tensor]:
        """Masters -> 16-bit tensors that the optimizer writes along with them."""
        rounded = (each for each in self._masters.values() if each.rounded is not None)
        return {each.weight: each.rounded for each in rounded}

    def buckets(self, masters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield lists of masters of one device, with about `BUCKET` elements."""
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for master in masters:
            by_device.setdefault(local_part(master).device, []).append(master)
        for same_device in by_device.values():
            bucket, size = [], 0
            for master in same_device:
                bucket.append(master)
                size += local_part(master).numel()
                if size >= BUCKET:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket

    def send(self, masters: Iterable[nn.Parameter]) -> None:
        """Queue the copies of updated masters, rounded if they are, to their parameters."""
        for weight in masters:
            master = self._by_weight[weight]
            source = local_part(weight) if master.rounded is None else master.rounded
            target = local_part(master.parameter)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source, non_blocking=True)

    def swap_gradients(self) -> None:
        """Leave the current gradients to an update; the next ones go to the other set."""
        self._wait_for_device()
        self._gradient_set = 1 - self._gradient_set

    def before_access(self, settle: Callable[[], None]) -> None:
        """Call `settle` before masters are read from parameters that others have written."""
        self._before_access = settle

    def write(self, *, send: bool = True) -> None:
        """Round all masters and send them, after they were changed without the optimizer."""
        with torch.no_grad():
            for master in self._masters.values():
                if master.rounded is not None:
                    master.rounded.copy_(local_part(master.weight))
            if send:
                self.send(self._by_weight)

    def note_written(
        self, parameters: Iterable[Tensor], where: Mapping = EVERYWHERE, *, gathered: bool = False
    ) -> None:
        """Copy to the masters from parameters that were written, all over or `where` (bool)."""
        self._before_access()
        for parameter in filter(self._masters.__contains__, parameters):
            master, mask = self._masters[parameter], where.get(parameter)
            for copy in (local_part(master.weight.detach()), master.rounded):
                if copy is not None:
                    new = local_part(parameter.detach()).to(copy)
                    new = new if mask is None else torch.where(mask.to(copy.device), new, copy)
                    copy.copy_(new)

    def wait(self) -> None:
        """Wait until all gradients are where the optimizer reads them, and weights may be written.

        What a backward pass that failed would have added is dropped.
        """
        self._wait_for_copies()
        self._late.clear()
        if self._device != self._compute_device:  # a pass after backward may still read weights
            self._wait_for_device()

    def _require_unused(self, sharding: Sharding) -> None:
        if sharding.gradients.has_masters or any(map(fsdp.has_run, sharding.units)):
            raise InputError(
                "the optimizer of a model that has run already, or has an offloaded optimizer, "
                "cannot be offloaded: create one, before the first forward pass, and keep it"
            )

    def _is_separate(self, device: torch.device) -> bool:
        """Whether updates on `device` must not write to the weights' own memory."""
        return device != self._device or self._delayed

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """What the model computes with; 0-d parameters, which no rank gathers, stay fp32."""
        return self._dtype if parameter.ndim else torch.float32

    def _device_of(self, parameter: nn.Parameter) -> torch.device:
        return self._device if parameter.ndim else self._compute_device

    def _make_weight(self, parameter: nn.Parameter, device: torch.device) -> Tensor | None:
        """Round and move a parameter's shard; return it in fp32, None if it stays so itself."""
        dtype = self._dtype_of(parameter)
        if dtype == torch.float32 and not self._is_separate(device):
            return None
        weight = local = local_part(parameter.detach())
        is_rounded = dtype != torch.float32
        is_there = local.device == device and local.dtype == torch.float32
        if not (is_rounded and is_there and local.is_contiguous()):
            weight = self._empty(local, device, torch.float32, is_sent=not is_rounded)
            weight.copy_(local)
        own = self._empty(local, self._device_of(parameter), dtype)
        _set_local_part(parameter, own.copy_(local))
        return weight

    def _make_master(
        self, parameter: nn.Parameter, weight: Tensor | None, device: torch.device
    ) -> Master:
        local = local_part(parameter.detach())
        if weight is None:
            weight = local
        rounded, dtype = None, self._dtype_of(parameter)
        if dtype != torch.float32:
            rounded = local
            if self._is_separate(device):
                rounded = self._empty(local, device, dtype)
        sets = 2 if self._delayed else 1
        master = nn.Parameter(fsdp.shard_like(parameter, weight))
        master.grad_dtype = self._gradient_dtype
        gradients = (self._empty(local, device, self._gradient_dtype) for _ in range(sets))
        return Master(
            parameter=parameter, weight=master, gradients=tuple(gradients), rounded=rounded
        )

    def _empty(
        self, like: Tensor, device: torch.device, dtype: torch.dtype, *, is_sent: bool = True
    ) -> Tensor:
        if self._pinned and device == HOST and is_sent:
            try:
                return page_locked(like.shape, dtype)
            except RuntimeError as error:
                self._pinned = False
                log.warning(
                    "offload: the system refuses page-locked memory (%s); the rest is pageable, "
                    "so copies wait for each other and for the computation",
                    str(error).splitlines()[0],
                )
        return torch.empty(like.shape, dtype=dtype, device=device)

    def _listen(self, sharding: Sharding) -> None:
        for unit in sharding.units:
            fsdp.take_gradients(unit, weakref.WeakMethod(self._take))
        if not sharding.units:
            take_whole = weakref.WeakMethod(self._take_whole)
            for parameter in self._masters:
                parameter.register_post_accumulate_grad_hook(lambda each: take_whole()(each))
        for root in sharding.roots:
            root.scalars.give_to(weakref.WeakMethod(self._take))
            root.gradients.use_masters(self.masters)
        sharding.gradients.use_masters(self.masters)

        def after_load(module: nn.Module, _: object) -> None:  # a method would be copied with it
            loaded = module.parameters(recurse=False)  # submodules have hooks of their own
            shards = (each for each in loaded if not isinstance(each, fsdp.WholeParameter))
            self.note_written(shards)

        for module in sharding.model.modules():
            module.register_load_state_dict_post_hook(after_load)
        frozen = {
            name: parameter
            for name, parameter in sharding.model.named_parameters()
            if not parameter.requires_grad
        }
        sharding.model.register_forward_pre_hook(partial(_require_frozen, frozen))
        add_holder(self)

    def _take_whole(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        self._take(parameter, local_part(gradient))

    def _take(self, parameter: nn.Parameter, mean: Tensor) -> None:
        """Copy a reduction's result to the master's gradient, or add it."""
        master = self._masters[parameter]
        gradient = master.gradients[self._gradient_set]
        record_use(mean)  # its memory belongs to the stream of the reduction
        is_first = master.weight.grad is None
        if is_first:
            master.weight.grad = fsdp.shard_like(master.weight, gradient)
        mean = mean.to(gradient.dtype)  # before it is sent
        if master.device == mean.device:
            (gradient.copy_ if is_first else gradient.add_)(mean)
            return
        target = gradient if is_first else self._addends.pop(master.weight, None)
        if target is None:
            target = self._empty(mean, master.device, mean.dtype)
        target.copy_(mean, non_blocking=True)
        self._events.append(torch.cuda.current_stream(mean.device).record_event())
        if not is_first:
            backward = fsdp.backward_id()
            if backward not in self._late:
                self._late[backward] = []
                fsdp.after_backward(partial(self._add_late, backward))
            self._late[backward].append((master, gradient, target))

    def _add_late(self, backward: int) -> None:
        self._wait_for_copies()
        for master, gradient, addend in self._late.pop(backward):
            gradient.add_(addend)
            self._addends[master.weight] = addend

    def _wait_for_copies(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events.clear()

    def _wait_for_device(self) -> None:
        if self._compute_device.type == "cuda":
            torch.cuda.current_stream(self._compute_device).synchronize()


def _require_frozen(frozen: Mapping[str, nn.Parameter], *_: object) -> None:
    """Raise InputError for a weight that has no master and was made trainable."""
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise InputError(
                f"{name} requires gradients, and it was frozen when the optimizer was offloaded: "
                "leave it trainable until then and freeze it afterwards, or leave "
                "offload_optimizer out"
            )


def _set_local_part(parameter: nn.Parameter, local: Tensor) -> None:
    """Replace the parameter's shard by `local`; it stays the same object."""
    if not isinstance(parameter, DTensor):  # may have weak references, which swapping refuses
        parameter.data = local
        return
    new_parameter = nn.Parameter(fsdp.shard_like(parameter, local), parameter.requires_grad)
    fsdp.inherit(new_parameter, parameter)
    torch.utils.swap_tensors(parameter, new_parameter)
