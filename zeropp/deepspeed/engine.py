"""The engine that `zeropp.initialize` returns: a model with its optimizer step.

    for batch in batches:
        loss = engine(batch)        # forward
        engine.backward(loss)       # of loss / gradient_accumulation_steps, times fp16's scale
        engine.step()               # updates the weights after the last micro-batch only

`engine.module(batch)` and `loss.backward()` may stand for the first two; fp16 needs
`engine.backward`, or `engine.scale`, for its scale.
A program that calls `set_gradient_accumulation_boundary` before each backward pass, as accelerate
does, decides which micro-batch is the last one, and may call `step()` only after that one.
The names are DeepSpeed's; the work is done by `zeropp.shard` and `zeropp.optimizer_step`.
"""

import logging
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar
from weakref import proxy

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zeropp import fsdp_adapter as fsdp
from zeropp.deepspeed.engine_files import EngineFiles
from zeropp.deepspeed.engine_settings import EngineSettings
from zeropp.deepspeed.gradient_accumulation import GradientAccumulation
from zeropp.deepspeed.parameter_values import ParameterOwner, mark_sharded, take_gradients
from zeropp.deepspeed.quantize_nontrainable import quantize_nontrainable_params
from zeropp.deepspeed.whole_state_dicts import WholeStateDicts
from zeropp.errors import InputError, RefusedCall, Unavailable
from zeropp.fsdp_adapter.passes import GradientHook, OwnerHook
from zeropp.optim.adam import parameters_in
from zeropp.optim.loss_scale import DeepSpeedLossScaler, deepspeed_loss_scaler
from zeropp.optim.sharded_optimizer import sharded
from zeropp.optim.step_or_skip import optimizer_step
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import BatchSizes, ZeroConfig
from zeropp.sharding.sharding import Sharding
from zeropp.wire.shard_holders import add_holder

log = logging.getLogger("zeropp")


class ThroughputTimer:
    """Counts the epochs that a program announces, as DeepSpeed's timer does; times nothing."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1


class Engine(EngineFiles, EngineSettings, GradientAccumulation, ParameterOwner, nn.Module):
    """A sharded model with its optimizer, schedule, loss scale and counters.

    `global_steps` counts optimizer steps, including skipped ones, and `global_samples` their
    samples; `micro_steps` counts micro-batches. Other attributes, such as `engine.generate`, are
    looked up in the model.
    """

    # What the loss of the running backward pass was multiplied by, by whichever engine began it.
    _factor: ClassVar[float] = 1.0

    def __init__(
        self,
        sharding: Sharding,
        config: ZeroConfig,
        batch: BatchSizes,
        environment: Environment,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: LRScheduler | None,
    ) -> None:
        super().__init__()
        self.module = sharding.model
        self.sharding, self.zero_config, self.batch = sharding, config, batch
        self.config: dict[str, Any] = config.to_dict()  # as JSON: what programs look up in it
        self.device = device
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.global_rank, self.local_rank = environment.rank, environment.local_rank
        self.world_size = environment.world_size  # ranks of the mesh, as in DeepSpeed
        self._is_first = dist.get_rank(sharding.group) == 0
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self._micro_steps = 0
        self.scaler = deepspeed_loss_scaler(config.loss_scaling)
        adds = config.gradient_allreduce_op == "sum"
        self._gradient_factor = self.world_size if adds else 1  # of means over the ranks
        self._state_dicts = WholeStateDicts(sharding)
        self._state_dicts.include(self.module)
        self.tput_timer = ThroughputTimer()
        self._grad_norm: float | None = None
        self._forwards = self._backwards = 0  # of this micro-batch
        self._depth = 0  # of calls of the module within its own forward
        self._is_scaled = False  # the loss of the running backward pass, by `scale`
        self._micro_batches_done = 0  # of this step
        self._is_gradient_accumulation_boundary: bool | None = (
            None  # if the caller says so, and not the number of steps
        )
        self._announced = 0  # micro-batches since the last `step()`, if so
        self._in_no_sync = self._has_unsent = False  # gradients that only this rank has
        self._coalesces = self._in_step = False
        self._was_applied = self._was_skipped = False
        self._told: Collection[str] = ()  # names of attributes that the optimizer got
        self._losses, self._knows_losses = torch.zeros((), device=device), True  # sum over a step
        add_holder(self)
        if optimizer is not None:
            self._tell_optimizer()
        self._gradient_hook = GradientHook(self._divisor_of_pass)
        self._hook_gradients()
        mark_sharded(self.module.parameters(), are_sharded=sharding.stage == 3)
        if sharding.stage < 3 and config.placement.frozen_bits is None:  # MixZ++ may add units
            sharding.keep_whole()
        self.module.register_forward_pre_hook(OwnerHook(self._before_forward))
        self.module.register_forward_hook(OwnerHook(self._after_forward), always_call=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output. In train() mode with gradients, this begins a micro-batch."""
        with self._autocast():
            output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled() and self.sharding.stage == 3:
            self.sharding.release()
        return output

    def train(self, mode: bool = True) -> "Engine":
        """Set the training mode; weights that an evaluation left gathered are freed."""
        is_between_steps = not self._forwards and not self._mid_step()
        if mode and self.sharding.stage < 3 and is_between_steps:
            self.sharding.release()
        return super().train(mode)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulate the gradients of `loss` / accumulation steps, and return that.

        With `scale_wrt_gas=False`, it is `loss` itself. Raises InputError without a forward pass
        before it, or for a loss of several elements.
        """
        if self.sharding.has_called_methods() and not self._forwards and self.training:
            self._count_forward()
        if not self._forwards:
            raise RefusedCall(
                "engine.backward(loss) without a forward pass: call engine(batch) first, in "
                "train() mode and with gradients enabled, once for each engine.step()"
            )
        if not isinstance(loss, torch.Tensor):
            raise InputError(f"the loss is a {type(loss).__name__}: give a tensor of one number")
        if loss.numel() != 1:
            raise RefusedCall(f"the loss has shape {list(loss.shape)}: give its mean, one number")
        divisor = self.batch.micro_batches if scale_wrt_gas else 1
        factor = self.loss_scale * self._gradient_factor / divisor
        self._gradient_hook.is_off, Engine._factor = True, factor
        try:
            (loss.float() * Engine._factor).sum().backward(retain_graph=retain_graph)
        finally:
            self._end_pass()
        self._backwards += 1
        self._losses += loss.detach().sum()
        return loss if divisor == 1 else loss / divisor

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times fp16's scale, for a program that calls `backward()` on it itself."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise RefusedCall("engine.scale(loss) takes a scalar tensor, the mean of losses")
        factor = self.loss_scale

        def begin_pass(_: torch.Tensor) -> None:
            self._is_scaled, Engine._factor = True, factor
            fsdp.after_backward(self._end_pass)

        scaled = loss.float() * factor
        if scaled.requires_grad:
            scaled.register_hook(begin_pass)
        return scaled

    def step(self) -> None:
        """End a micro-batch; after the last one of a step, clip, update and step the schedule.

        Raises InputError without a backward pass before it, without an optimizer, inside `no_sync`,
        and for non-finite gradients if there is no loss scale to lower.
        """
        if self.optimizer is None:
            raise RefusedCall(
                "engine.step() needs an optimizer: give zeropp.initialize one, or name one in the "
                "JSON's optimizer section"
            )
        if self._in_no_sync:
            raise RefusedCall("engine.step() inside engine.no_sync(): call it after the context")
        if not self._backwards and not self._has_others_gradients():
            hint = ": one outside engine.no_sync() sends its gradients" if self._has_unsent else ""
            raise RefusedCall(f"engine.step() without engine.backward(loss) before it{hint}")
        self._in_step = True
        is_boundary, self._in_step = self.is_gradient_accumulation_boundary(), False
        count = max(1, self._announced)
        if not self.managed_gradient_accumulation():
            count = max(1, self._forwards)
            self.sharding.reduce_accumulated()
        self._micro_steps += count
        self._micro_batches_done += count
        self._was_applied = False
        self._end_micro_batch()
        if is_boundary:
            self._micro_batches_done = 0
            self._optimizer_step(count)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of this step, on the host too; gather weights. All ranks call it."""
        self.sharding.discard_gradients(set_to_none)
        self._end_pass()  # which may have failed
        self._has_unsent = False
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        self.sharding.gather()

    def quantize_nontrainable_params(self) -> None:
        """Quantize the parameters that are frozen now, and train those that were added (MixZ++).

        For models that were changed after `zeropp.initialize`; the optimizer has the same method,
        as in DeepSpeed. Raises InputError as
        `zeropp.deepspeed.quantize_nontrainable.quantize_nontrainable_params` does.
        """
        self.sharding = quantize_nontrainable_params(
            self.sharding, self.zero_config, self.optimizer, self.device
        )
        self._state_dicts.include(self.module)
        self._hook_gradients()
        mark_sharded(self.module.parameters(), are_sharded=self.sharding.stage == 3)

    def destroy(self) -> None:
        """Wait for an update under way, and drop the optimizer and the schedule.

        Without them, and once nothing else refers to the model, its memory is freed.
        """
        if self.optimizer is not None:
            sharded(self.optimizer).settle()
        self.sharding.release()
        self.optimizer = self.lr_scheduler = None

    @property
    def loss_scale(self) -> float:
        """The factor that fp16 losses are multiplied by; 1 in other formats."""
        return self.scaler.scale if self.scaler else 1.0

    def _autocast(self) -> AbstractContextManager:
        """Return `torch.autocast` as the JSON has it; without, the program's is as it is."""
        if not (dtype := self.zero_config.autocast_format):
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, dtype))

    def _has_others_gradients(self) -> bool:
        """Whether the program has set gradients itself, and no pass of this step has begun."""
        if self._forwards or self._mid_step():
            return False
        take_gradients(self.module.parameters())
        held = parameters_in(self.optimizer.param_groups)
        return any(parameter.grad is not None for parameter in held)

    def _tell_optimizer(self) -> None:
        """Give the optimizer what DeepSpeed's has and it has not, as it is after a step."""
        scaler = self.scaler or DeepSpeedLossScaler(scale=1.0, dynamic=False)
        values = dict(
            optimizer=proxy(self.optimizer),
            loss_scaler=scaler,
            loss_scale_config=scaler,
            loss_scale=scaler.scale,
            cur_scale=scaler.scale,
            dynamic_loss_scale=scaler.dynamic,
            overflow=self._was_skipped,
            _global_grad_norm=self._grad_norm,
            needs_scaler=partial(bool, self.scaler),
            is_sharded=self.sharding.stage > 0,
        )
        self._told = self._told or values.keys() - {*dir(self.optimizer)}  # leaves its own alone
        vars(self.optimizer).update({name: values[name] for name in self._told})

    def _before_forward(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and self.training:
            self._count_forward()

    def _count_forward(self) -> None:
        if self._forwards == 0:
            self._begin_micro_batch()
        self._forwards += 1

    def _after_forward(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)

    def _hook_gradients(self) -> None:
        """Take notice of what backward passes of others add to the model's gradients."""
        for parameter in self.module.parameters():
            fsdp.hook_gradient(parameter, self._gradient_hook)

    def _divisor_of_pass(self) -> float | None:
        """Return what passes of others are divided by that add to gradients, as `backward` does.

        Other gradients, as of inputs or by `torch.autograd.grad`, are what PyTorch computes.
        """
        if not fsdp.adds_gradient():
            return None
        if self.scaler and not self._is_scaled:
            raise Unavailable(
                "Loss scaling is required: loss.backward() under fp16 computes gradients of a loss "
                "without its scale, and small ones would vanish: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        self._backwards += 1
        self._knows_losses = False
        own = self.loss_scale * self._gradient_factor
        divisor = self.batch.micro_batches * (Engine._factor / own)
        return divisor if divisor != 1 else None

    def _end_pass(self) -> None:
        self._gradient_hook.is_off, self._is_scaled, Engine._factor = False, False, 1.0

    def _optimizer_step(self, micro_batches: int) -> None:
        with self.sharding.as_shards():
            self.sharding.release(held=True)  # what an evaluation after backward has left, too
            result = optimizer_step(
                self.optimizer,
                self.sharding,
                clip_grad=self.zero_config.gradient_clipping,
                scaler=self.scaler,
            )
        self._has_unsent = False
        self.global_steps += 1
        if self.managed_gradient_accumulation():
            micro_batches = self.batch.micro_batches
        self.global_samples += micro_batches * self.batch.micro_samples * self.world_size
        self.skipped_steps += result.skipped
        self._was_applied, self._was_skipped = not result.skipped, result.skipped
        self._grad_norm = result.grad_norm
        self._tell_optimizer()
        if result.skipped and not self.scaler:
            self._note_overflow()
        if self.lr_scheduler is not None and not result.skipped:
            self.lr_scheduler.step()
        self._report()

    def _note_overflow(self) -> None:
        """Raise InputError for gradients that are not finite, or warn if the JSON skips them."""
        norm, step = self._grad_norm, self.global_steps
        if not self.zero_config.bf16.check_grad_overflow:
            raise RefusedCall(
                f"the norm of the gradients is {norm} at step {step}, and no update was made: "
                "lower the learning rate, clip the gradients, or look at the data"
            )
        if self._is_first:
            log.warning("step %d is skipped: its gradients are not finite", step)

    def _report(self) -> None:
        every, losses = self.zero_config.steps_per_print, self._losses
        knows_losses, self._knows_losses = self._knows_losses, True
        self._losses = torch.zeros_like(losses)
        if every and self.global_steps % every == 0 and self._is_first:
            scale = f", loss scale {self.loss_scale:g}" if self.scaler else ""
            mean = losses.item() / self.batch.micro_batches
            log.info(
                "step %d, %sgradient norm %.3f, lr %s, skipped %d%s",
                self.global_steps,
                f"loss {mean:.4f} (rank 0), " if knows_losses else "",
                self._grad_norm,
                ", ".join(f"{lr:g}" for lr in self.get_lr()),
                self.skipped_steps,
                scale,
            )
