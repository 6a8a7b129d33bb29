"""The engine that `zeropp.initialize` returns: a model with its optimizer step.

    for batch in batches:
        loss = engine(batch)        # forward
        engine.backward(loss)       # of loss / gradient_accumulation_steps, times fp16's scale
        engine.step()               # updates the weights after the last micro-batch only

A program that calls `set_gradient_accumulation_boundary` before each backward pass, as accelerate
does, decides which micro-batch is the last one, and may call `step()` only after that one.
The names are DeepSpeed's; the work is done by `zeropp.shard` and `zeropp.optimizer_step`.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zeropp.checkpoint.state_tensors import settle
from zeropp.deepspeed.engine_files import EngineFiles
from zeropp.deepspeed.quantize_nontrainable import quantize_nontrainable_params
from zeropp.deepspeed.whole_state_dicts import WholeStateDicts
from zeropp.errors import InputError
from zeropp.optim.loss_scale import LossScaler
from zeropp.optim.step_or_skip import optimizer_step
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import BatchSizes, ZeroConfig
from zeropp.sharding.sharding import Sharding

log = logging.getLogger("zeropp")


class ThroughputTimer:
    """Counts the epochs that a program announces, as DeepSpeed's timer does; times nothing."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1


class Engine(EngineFiles, nn.Module):
    """A sharded model with its optimizer, schedule, loss scale and counters.

    `global_steps` counts optimizer steps, including skipped ones; `micro_steps` counts calls of
    `step()`. Other attributes, such as `engine.generate`, are looked up in the model.
    """

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
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self.scaler = _loss_scaler(config)
        self._state_dicts = WholeStateDicts(sharding)
        self._state_dicts.include(self.module)
        self.tput_timer = ThroughputTimer()
        self._grad_norm: float | None = None
        self._forwards = self._backwards = 0  # of this micro-batch
        self._is_boundary: bool | None = None  # if the caller says so, and not the number of steps
        self._announced = 0  # micro-batches since the last `step()`, if so
        self._losses = torch.zeros((), device=device)  # sum over this step's micro-batches

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output. In train() mode with gradients, this begins a micro-batch."""
        if torch.is_grad_enabled() and self.training:
            if self._forwards == 0:
                self.sharding.begin_micro_step(last=self.is_gradient_accumulation_boundary())
            self._forwards += 1
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled() and self.sharding.stage == 3:
            self.sharding.release()
        return output

    def train(self, mode: bool = True) -> "Engine":
        """Set the training mode; weights that an evaluation left gathered are freed."""
        if mode and self.sharding.stage < 3 and not self._forwards and not self._mid_step():
            self.sharding.release()
        return super().train(mode)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulate the gradients of `loss` / accumulation steps; return `loss` unchanged.

        Raises InputError without a forward pass before it, or for a loss of several elements.
        """
        if not self._forwards:
            raise InputError(
                "engine.backward(loss) without a forward pass: call engine(batch) first, in "
                "train() mode and with gradients enabled, once for each engine.step()"
            )
        if loss.numel() != 1:
            raise InputError(f"the loss has shape {list(loss.shape)}: give its mean, one number")
        scale = self.loss_scale
        if scale_wrt_gas:
            scale /= self.batch.micro_batches
        (loss.float() * scale).sum().backward(retain_graph=retain_graph)
        self._backwards += 1
        self._losses += loss.detach().sum()
        return loss

    def step(self) -> None:
        """End a micro-batch; after the last one of a step, clip, update and step the schedule.

        Raises InputError without a backward pass before it, without an optimizer, and for
        non-finite gradients if there is no loss scale to lower.
        """
        if self.optimizer is None:
            raise InputError(
                "engine.step() needs an optimizer: give zeropp.initialize one, or name one in the "
                "JSON's optimizer section"
            )
        if not self._backwards:
            raise InputError("engine.step() without engine.backward(loss) before it")
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += max(1, self._announced)
        self._forwards = self._backwards = self._announced = 0
        if boundary:
            self._optimizer_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients: offloaded ones too, and those of the micro-batches of this step."""
        self.sharding.discard_gradients(set_to_none)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if self._is_boundary is not None:
            return self._is_boundary
        return (self.micro_steps + 1) % self.batch.micro_batches == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward pass is the last one of a step.

        To be called before each backward pass, from the first one on.
        """
        self._is_boundary = bool(is_boundary)
        self._announced += 1
        self.sharding.begin_micro_step(last=self._is_boundary)

    def train_batch_size(self) -> int:
        """Samples of a step, on all ranks."""
        return self.batch.samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch, on one rank."""
        return self.batch.micro_samples

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.batch.micro_batches

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.sharding.stage

    def fp16_enabled(self) -> bool:
        """Whether forward and backward compute in float16."""
        return self.zero_config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether forward and backward compute in bfloat16."""
        return self.zero_config.bf16.enabled

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

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's gradients before clipping; None before a step."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group["lr"] for group in groups]

    def destroy(self) -> None:
        """Wait for an update under way, and drop the optimizer and the schedule.

        Without them, and once nothing else refers to the model, its memory is freed.
        """
        if self.optimizer is not None:
            settle(self.optimizer)
        self.sharding.release()
        self.optimizer = self.lr_scheduler = None

    @property
    def loss_scale(self) -> float:
        """The factor that fp16 losses are multiplied by; 1 in other formats."""
        return self.scaler.scale if self.scaler else 1.0

    def _mid_step(self) -> bool:
        if self._is_boundary is not None:
            return self._announced > 0 or not self._is_boundary
        return self.micro_steps % self.batch.micro_batches != 0

    def _begin_step_again(self) -> None:
        """Discard what the micro-batches of this step have left."""
        self.zero_grad()
        self._forwards = self._backwards = self._announced = 0
        self._is_boundary = None
        self.micro_steps -= self.micro_steps % self.batch.micro_batches
        self._losses = torch.zeros_like(self._losses)

    def _optimizer_step(self) -> None:
        self.sharding.release()  # an evaluation after backward may have left weights gathered
        result = optimizer_step(
            self.optimizer,
            self.sharding,
            clip_grad=self.zero_config.gradient_clipping,
            scaler=self.scaler,
        )
        self.global_steps += 1
        self.skipped_steps += result.skipped
        self._grad_norm = result.grad_norm
        if result.skipped and not self.scaler:
            raise InputError(
                f"the norm of the gradients is {result.grad_norm} at step {self.global_steps}, and "
                "no update was made: lower the learning rate, clip the gradients, or look at the "
                "data"
            )
        if self.lr_scheduler is not None and not result.skipped:
            self.lr_scheduler.step()
        self._report()

    def _report(self) -> None:
        every, losses = self.zero_config.steps_per_print, self._losses
        self._losses = torch.zeros_like(losses)
        if every and self.global_steps % every == 0 and self._is_first:
            scale = f", loss scale {self.loss_scale:g}" if self.scaler else ""
            log.info(
                "step %d, loss %.4f (rank 0), gradient norm %.3f, lr %s, skipped %d%s",
                self.global_steps,
                losses.item() / self.batch.micro_batches,
                self._grad_norm,
                ", ".join(f"{lr:g}" for lr in self.get_lr()),
                self.skipped_steps,
                scale,
            )


def _loss_scaler(config: ZeroConfig) -> LossScaler | None:
    """Return the scaler of the JSON's fp16 section; None in other formats."""
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    fixed = fp16.loss_scale > 0
    return LossScaler(
        scale=fp16.loss_scale if fixed else 2.0**fp16.initial_scale_power,
        min_scale=fp16.min_loss_scale,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        dynamic=not fixed,
    )
