"""A unit's gradients: completed before they are reduced, taken afterwards, or discarded."""

from collections.abc import Callable
from functools import partial
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from zeropp.fsdp_adapter.parameters import (
    Unit,
    groups_of,
    groups_of_state,
    hook_gradient,
    parameters_of,
    state_of,
)


def accumulates(unit: FSDPModule) -> bool:
    """Whether the unit has gradients that are to be reduced later."""
    return any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(parameter, "_unsharded_param", parameter.sharded_param).grad is not None
        for parameter in parameters_of(unit)
    )


def unreduced_gradient(unit: FSDPModule, shard: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's whole gradient of a parameter, in fp32, that is to be reduced later."""
    for parameter in parameters_of(unit):
        if parameter.sharded_param is shard:
            if (total := parameter.unsharded_accumulated_grad) is not None:
                parameter.unsharded_accumulated_grad = total.to(parameter.reduce_dtype)
                return parameter.unsharded_accumulated_grad
            return getattr(parameter, "_unsharded_param", shard).grad
    return None


def take_gradients(
    unit: FSDPModule, take: WeakMethod[Callable[[nn.Parameter, torch.Tensor], None]]
) -> None:
    """Pass this rank's part of each averaged gradient, in fp32, to `take`; leave no `.grad`.

    `take` is called as each reduction is queued, on its stream. FSDP2 rounds the means to the
    parameters' dtype; the means from before rounding are passed on. Where it keeps the parameters
    on the host, it would also copy each rounded mean there, and wait for that because of our hooks.
    While it puts the means in their places, it is told that the parameters are on the device.
    Python's collector does not see what a tensor's hooks refer to, so they refer to nothing that
    would keep the tensor alive.
    """
    remaining: list[torch.Tensor] = []  # the part of the buffer of means not yet passed on
    on_host = WeakSet(each for each in parameters_of(unit) if each.offload_to_cpu)

    def keep_means(means: torch.Tensor) -> None:
        remaining[:] = [means]
        for parameter in on_host:
            parameter.offload_to_cpu = False

    def pass_on(parameter: nn.Parameter, padded: int) -> None:
        local, parameter.grad = parameter.grad._local_tensor, None
        means = remaining.pop()
        if padded < means.numel():  # an empty view would keep the buffer alive
            remaining.append(means[padded:])
        else:
            for each in on_host:
                each.offload_to_cpu = True
        take()(parameter, means[: local.numel()].view(local.shape))

    unit.set_all_reduce_hook(keep_means)
    for parameter in on_host:  # a gradient must be where its parameter is, if only until `pass_on`
        parameter.to_sharded_dtensor = partial(_placeholder, parameter)
    for parameter in parameters_of(unit):
        if parameter.sharded_param.requires_grad:
            hook = partial(pass_on, padded=parameter.padded_sharded_param_size.numel())
            parameter.sharded_param.register_post_accumulate_grad_hook(hook)


def before_reduction(
    unit: Unit, report: Callable[[list[int], list[int]], None] | None
) -> Callable[[], None]:
    """Complete the unit's gradients before each reduction, and call `report`.

    FSDP2 leaves parameters without a gradient out of the buffer that it reduces, so ranks that use
    different parameters would add up the wrong ones. Here trained parameters of a unit that was
    used get zeros instead. `report` gets indices in `own_specs`: of the parameters that have a
    gradient of their own, and of all that are in the buffer, in its order. Without `report` there
    is one rank, and what it has summed up is its mean: no buffer is filled, where FSDP2 allows it.

    Returns what undoes this.
    """
    state, groups, hooks = state_of(unit), groups_of(unit), []
    for group in groups:
        group.zeropp_reducer = _Reducer(state, group, group.post_backward, report)
        group.post_backward = group.zeropp_reducer
        group.reshard = partial(group.zeropp_reducer.free, group.reshard)
        for module in state._modules:  # a pass may run only some of them
            hooks.append(module.register_forward_pre_hook(group.zeropp_reducer.note_forward))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for group in groups:
            del group.zeropp_reducer, group.post_backward, group.reshard

    return undo


class _Reducer:
    """FSDP2's `post_backward` of a unit, which reduces its gradients, after completing them."""

    def __init__(
        self, state: object, group: object, reduce: Callable, report: Callable | None
    ) -> None:
        self.state, self.group, self.reduce, self.report = state, group, reduce, report
        self.is_due = False  # the unit ran forward, with gradients, since its last reduction
        self.waits = False  # for a pass's end: some uses of the unit are not calls of its module
        self.keeps = False  # the weights: a graph of gradients, yet to be differentiated, has them
        self.note_pass = partial(_note_pass, ref(self))

    def note_forward(self, *_: object) -> None:
        self.is_due = self.is_due or torch.is_grad_enabled()

    def free(self, reshard: Callable[[], None]) -> None:
        """Free the gathered weights, unless a pass to come needs them."""
        state = self.group._training_state
        self.keeps = self.keeps and state != TrainingState.IDLE  # else they may have changed
        if not self.keeps and not (self.waits and state == TrainingState.FORWARD):
            reshard()

    def __call__(self, *arguments: object) -> None:
        if not self.waits or torch._C._current_autograd_node() is None:
            self.run(*arguments)

    def run(self, *arguments: object) -> None:
        """Reduce, and show shards, frozen or trained as was set since the forward pass."""
        own = self.group.fsdp_params if hasattr(self.group, "zeropp_shows_shards") else []
        for parameter in filter(_is_shown, own):
            shard, is_trained = parameter.sharded_param, parameter._unsharded_param.requires_grad
            if shard.requires_grad != is_trained:
                shard.requires_grad_(is_trained)
        self._run(*arguments)
        stays = self.group.is_unsharded and getattr(self.group, "zeropp_shows_shards", False)
        if stays and not torch.is_grad_enabled():  # else a pass is to come
            for parameter in own:
                parameter._setattr_on_modules(parameter.sharded_param)

    def _run(self, *arguments: object) -> None:
        group = self.group
        if not _adds_gradients(self.state._state_ctx):
            group._training_state = TrainingState.POST_BACKWARD
            if torch.is_grad_enabled():
                self.keeps = True
                self.await_gradients()
            elif group.reshard_after_backward and not self.waits:
                group.reshard()
            return
        if self.state._is_root:
            self.reduce_others()
        fills = self.report is not None
        if not fills and _adds_alone(group):
            self.is_due = self.is_due and not group.reduce_grads
            _add_alone(group)
            return
        if group.reduce_grads and (self.is_due or group._training_state != TrainingState.IDLE):
            self.is_due = False
            with_gradient, reduced = _complete_gradients(group.fsdp_params, fills=fills)
            if fills and reduced:
                self.report(with_gradient, reduced)
        if group.reduce_grads or all(map(_was_gathered, group.fsdp_params)):
            self.reduce(*arguments)  # else FSDP2 would fail, and there is nothing to add up

    def await_gradients(self) -> None:
        """Reduce at the end of passes that make gradients, if they run past all outputs, too.

        Outputs of the root and of units are where FSDP2 takes note of passes.
        """
        for parameter in filter(_was_gathered, self.group.fsdp_params):
            if parameter._unsharded_param.requires_grad:
                hook_gradient(parameter._unsharded_param, self.note_pass)

    def reduce_others(self) -> None:
        """Reduce the units inside the root whose input needs no gradient before the root itself.

        FSDP2 would do so afterwards, and on other ranks the input may need one.
        """
        for state in reversed(self.state._state_ctx.all_states):
            for group in reversed(groups_of_state(state)):
                reducer = getattr(group, "zeropp_reducer", self)
                if reducer.state is not self.state and reducer.is_due and group.reduce_grads:
                    reducer.run()


def _note_pass(reducer: ref[_Reducer], _: torch.Tensor) -> None:
    if (alive := reducer()) is not None:
        alive.is_due = True
        alive.state._register_root_post_backward_final_callback()


def adds_gradient(leaf: torch.autograd.graph.Node | None = None) -> bool:
    """Whether the running backward pass adds to a leaf's gradient: by default that whose hook runs.

    Those that `torch.autograd.grad` returns are not added, and PyTorch refuses to tell of them.
    """
    try:
        return torch._C._will_engine_execute_node(leaf or torch._C._current_autograd_node())
    except RuntimeError:
        return False


def _adds_gradients(context: object) -> bool:
    """Whether the running pass adds to the gradient of any weight of a root; `torch.func` never."""
    if torch._C._are_functorch_transforms_active():
        return False
    number = torch._C._current_graph_task_id()
    if getattr(context, "zeropp_pass", (None,))[0] != number:
        groups = (group for state in context.all_states for group in groups_of_state(state))
        gathered = (each for group in groups for each in group.fsdp_params if _was_gathered(each))
        trained = (
            each._unsharded_param for each in gathered if each._unsharded_param.requires_grad
        )
        leaves = (get_gradient_edge(each).node for each in trained)
        context.zeropp_pass = number, number == -1 or any(map(adds_gradient, leaves))
    return context.zeropp_pass[1]


def _is_shown(parameter: FSDPParam) -> bool:
    """Whether modules hold the gathered weight."""
    info = parameter._module_info
    return getattr(info.module, info.param_name) is getattr(parameter, "_unsharded_param", None)


def _was_gathered(parameter: FSDPParam) -> bool:
    return hasattr(parameter, "_unsharded_param")


def _complete_gradients(parameters: list[FSDPParam], *, fills: bool) -> tuple[list[int], list[int]]:
    """Give zeros, if asked, to trained parameters without a gradient; see `before_reduction`."""
    gathered = {
        index: parameter for index, parameter in enumerate(parameters) if _was_gathered(parameter)
    }
    for parameter in gathered.values():
        parameter.accumulate_unsharded_grad_if_needed()
    sums = [parameter.unsharded_accumulated_grad for parameter in gathered.values()]
    dtype = next((total.dtype for total in sums if total is not None), None)
    with_gradient, reduced = [], []
    for index, parameter in gathered.items():
        whole = parameter._unsharded_param
        if not whole.numel():  # FSDP2 cannot reduce nothing
            whole.grad = parameter.unsharded_accumulated_grad = None
            continue
        if dtype is not None:
            parameter.to_accumulated_grad_if_needed()  # FSDP2 reduces gradients of one dtype only
        if parameter.unsharded_accumulated_grad is not None or whole.grad is not None:
            with_gradient.append(index)
        elif not fills or not whole.requires_grad:
            continue
        elif dtype is not None and dtype != whole.dtype:
            parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)
        else:
            whole.grad = torch.zeros_like(whole)
        reduced.append(index)
    return with_gradient, reduced


def _adds_alone(group: FSDPParamGroup) -> bool:
    """Whether one rank's 16-bit gradients become fp32 sums on its device, and nothing else."""
    dtype, factor, hook = group._reduce_dtype, group.gradient_divide_factor, group._all_reduce_hook
    if dtype is None or dtype != group._orig_dtype or factor is not None or hook is not None:
        return False
    return not any(e.offload_to_cpu or e.is_dtensor for e in group.fsdp_params)


@torch.no_grad()
def _add_alone(group: FSDPParamGroup) -> None:
    """Do what FSDP2's `post_backward` does on one rank, without its copies.

    The first gradients of a step stay in 16 bit until others are added to them, in fp32 as always.
    With two micro-batches, activations are never in memory beside sums of 4 bytes.
    """
    group._training_state = TrainingState.POST_BACKWARD
    if group.reshard_after_backward:
        group.reshard()
    gathered, added = [*filter(_was_gathered, group.fsdp_params)], {}
    for each in gathered:
        gradient, each._unsharded_param.grad = each._unsharded_param.grad, None
        if gradient is not None and each.unsharded_accumulated_grad is not None:
            added[each] = gradient
        elif gradient is not None and gradient.numel():
            each.unsharded_accumulated_grad = gradient.detach()
    given = [each for each in gathered if each.unsharded_accumulated_grad is not None]
    dtype, summed = group._reduce_dtype, given if group.reduce_grads else [*added]
    if narrow := [each for each in summed if each.unsharded_accumulated_grad.dtype != dtype]:
        wide = _copies([each.unsharded_accumulated_grad for each in narrow], dtype)
        for each, total in zip(narrow, wide, strict=True):
            each.unsharded_accumulated_grad = total
    if added:
        totals = [each.unsharded_accumulated_grad for each in added]
        torch._foreach_add_(totals, _copies([*added.values()], dtype))
    if group.reduce_grads:
        _give_to_shards(given)


def _give_to_shards(parameters: list[FSDPParam]) -> None:
    """Let one rank's sums be the gradients of its shards, or be added to these."""
    if again := [each for each in parameters if each.sharded_param.grad is not None]:
        totals = [each.sharded_param.grad._local_tensor for each in again]
        torch._foreach_add_(totals, [each.unsharded_accumulated_grad for each in again])
    for each in parameters:
        shard, total = each.sharded_param, each.unsharded_accumulated_grad
        each.unsharded_accumulated_grad = None
        if shard.grad is None:
            shard.grad = each.to_sharded_dtensor(total)
        for hook in [*(shard._post_accumulate_grad_hooks or {}).values()]:
            hook(shard)


def _copies(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    copies = [each.new_empty(each.shape, dtype=dtype) for each in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _placeholder(parameter: FSDPParam, gradient: torch.Tensor) -> DTensor:
    return parameter.sharded_param.detach()


def set_gradient_dtypes(unit: FSDPModule) -> None:
    """Set what the unit's gradients are reduced in, if all of it was frozen when it first ran.

    FSDP2 does that once, and asks the parameters that are trained then.
    """
    for group in groups_of(unit):
        trained = any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)
        if trained and group._reset_sharded_params and group._orig_dtype is None:
            group._init_mp_dtypes()


def forget_forward(group: object) -> None:
    """Let no reduction of these parameters be due: their last forward pass was abandoned."""
    if reducer := getattr(group, "zeropp_reducer", None):
        reducer.is_due = False


def reduce_accumulated(root: FSDPModule, also: Callable[[torch.Tensor], None]) -> None:
    """Reduce what the passes of a root have accumulated, in a backward pass without a model.

    Its units must be set to reduce gradients. `also` is called as that pass begins.
    """
    state = state_of(root)

    def begin(gradient: torch.Tensor) -> None:
        state._state_ctx.zeropp_pass = torch._C._current_graph_task_id(), True
        state._register_root_post_backward_final_callback()
        also(gradient)

    start = torch.zeros((), requires_grad=True)
    start.register_hook(begin)
    (start + 0).backward()


def discard_gradients(unit: FSDPModule, set_to_none: bool = True) -> None:
    """Clear the unit's gradients, those included that FSDP2 accumulates until it reduces them."""
    for group in groups_of(unit):
        forget_forward(group)
    for each in parameters_of(unit):
        holders = [each.sharded_param, getattr(each, "_unsharded_param", each.sharded_param)]
        if set_to_none:
            each.unsharded_accumulated_grad = holders[0].grad = holders[1].grad = None
            continue
        for gradient in (each.unsharded_accumulated_grad, *(holder.grad for holder in holders)):
            if gradient is not None:
                gradient.detach().zero_()
