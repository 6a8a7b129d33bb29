"""Where a sharded model's averaged gradients are, and those of 0-d parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from zeropp import fsdp_adapter as fsdp
from zeropp.wire.shard_holders import add_holder


class Gradients:
    """The averaged gradients of a model: its parameters hold them, or their masters do."""

    def __init__(self) -> None:
        self._masters: Mapping[nn.Parameter, nn.Parameter] = {}
        self._parameters: Mapping[nn.Parameter, nn.Parameter] = {}  # of masters

    def use_masters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Look for the gradients of these parameters in their masters."""
        self._masters = masters
        self._parameters = {master: parameter for parameter, master in masters.items()}

    @property
    def has_masters(self) -> bool:
        return bool(self._masters)

    def parameter_of(self, holder: nn.Parameter) -> nn.Parameter:
        """Return the parameter whose master this is, or the parameter itself."""
        return self._parameters.get(holder, holder)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter."""
        return self._masters.get(parameter, parameter).grad

    def clear(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of a parameter."""
        self._masters.get(parameter, parameter).grad = None


class ScalarGradients:
    """The gradients of a model's 0-d parameters; `group` are its data ranks.

    FSDP2 cannot shard these: they stay whole on every rank, in fp32. Each rank adds up its own
    gradients until a step's last backward pass. At the end of that they are averaged, all in one
    all-reduce: their sums, and how many ranks had one. A parameter that no rank used keeps `.grad`
    None.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._places: list[tuple[nn.Module, str]] = []  # parameters may be replaced
        self._passes: set[int] = set()  # running backward passes at whose end means are taken
        self.is_due = True  # at the end of the next backward pass
        self._trained: set[nn.Parameter] = set()  # in this step; some may be frozen since
        self._note = partial(_note_gradient, ref(self))
        self._take: WeakMethod[Callable[[nn.Parameter, torch.Tensor], None]] | None = None
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.ndim:
                    self._places.append((module, name))
        if self._places:
            model.register_forward_hook(self._after_forward)
            add_holder(self)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, tied ones once."""
        return list(dict.fromkeys(getattr(module, name) for module, name in self._places))

    def give_to(self, take: WeakMethod[Callable[[nn.Parameter, torch.Tensor], None]]) -> None:
        """Pass each mean to `take`, and leave no `.grad`."""
        self._take = take

    def move_to_device(self) -> None:
        """Move the parameters to where the model computes."""
        for parameter in self.parameters():
            if not parameter.is_meta and parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)

    @torch.no_grad()
    def send(self, source: int, parameters: list[nn.Parameter]) -> None:
        """Give those of these parameters that are the model's the values of the rank `source`."""
        ids = {id(parameter) for parameter in parameters}
        for parameter in self.parameters():
            if id(parameter) in ids:
                dist.broadcast(parameter.data, src=source, group=self._group)

    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        """Note the backward pass of this forward pass when it begins, as all ranks' passes do."""
        if torch.is_grad_enabled():
            self._trained.update(each for each in self.parameters() if each.requires_grad)
            for parameter in self._trained:
                fsdp.hook_gradient(parameter, self._note)
            for each in pytree.tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(self.begin)

    def begin(self, *_: torch.Tensor) -> None:
        """Take the means at the end of the running backward pass, after its reductions.

        Passes through the graph of another one's gradients may run past all outputs. Units that
        are reduced begin those on all ranks, and what a rank adds to its gradients elsewhere.
        """
        if self._places and self.is_due and fsdp.backward_id() not in self._passes:
            self._passes.add(fsdp.backward_id())
            fsdp.after_backward(partial(fsdp.after_backward, self._average))

    @torch.no_grad()
    def _average(self) -> None:
        self._passes.clear()
        trained = [parameter for parameter in self.parameters() if parameter in self._trained]
        self._trained = {parameter for parameter in trained if parameter.requires_grad}
        if not trained:
            return
        sums = torch.zeros(2, len(trained), device=self._device)
        for index, parameter in enumerate(trained):
            if parameter.grad is not None:
                sums[0, index], sums[1, index] = parameter.grad, 1
        if self._group.size() > 1:
            dist.all_reduce(sums, group=self._group)
        means = sums[0] / self._group.size()
        is_used = [True] * len(trained)
        if any(parameter.grad is None for parameter in trained):  # the host waits for the others
            is_used = sums[1].bool().tolist()
        for parameter, mean, used in zip(trained, means, is_used, strict=True):
            if used and self._take is not None:
                parameter.grad = None
                self._take()(parameter, mean)
            elif used:
                parameter.grad = mean.to(parameter.dtype)


def _note_gradient(scalars: ref[ScalarGradients], _: torch.Tensor) -> None:
    if (alive := scalars()) is not None and fsdp.adds_gradient():
        alive.begin()
