"""What programs ask an engine about its settings, and what they may change between steps."""

from collections.abc import Sequence
from typing import Any, NoReturn

from zeropp.errors import RefusedCall


class EngineSettings:
    """The methods of `Engine` that return or set what the JSON said."""

    def train_batch_size(self) -> int:
        """Samples of a step, on all ranks."""
        return self.batch.samples

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch, on one rank."""
        return self.batch.micro_samples

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.batch.micro_batches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, those of a micro-batch, and the micro-batches of a step."""
        return tuple(self.batch)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by another number of micro-batches, from the next step on.

        Raises InputError in the middle of a step, and for a size that is not a multiple of the
        samples of a micro-batch on all ranks.
        """
        at_once = self.batch.micro_samples * self.world_size
        if train_batch_size < 1 or train_batch_size % at_once:
            raise RefusedCall(
                f"set_train_batch_size({train_batch_size}): expected a multiple of {at_once}, "
                f"{self.batch.micro_samples} samples on each of {self.world_size} ranks"
            )
        self._set_batch(train_batch_size, self.batch.micro_samples)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch; a step has as many micro-batches as before.

        The data loader of `zeropp.initialize` keeps its size. Raises InputError in the middle of a
        step.
        """
        if micro_batch_size < 1:
            raise RefusedCall(
                f"set_train_micro_batch_size({micro_batch_size}): expected at least 1"
            )
        samples = micro_batch_size * self.batch.micro_batches * self.world_size
        self._set_batch(samples, micro_batch_size)

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is 1 or more."""
        return self.sharding.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.sharding.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the ZeRO stage is 2 or more."""
        return self.sharding.stage > 1

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the ZeRO stage is 3."""
        return self.sharding.stage > 2

    def fp16_enabled(self) -> bool:
        """Whether forward and backward compute in float16."""
        return self.zero_config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether forward and backward compute in bfloat16."""
        return self.zero_config.bf16.enabled

    def gradient_clipping(self) -> float:
        """The norm to which gradients are clipped; 0 means that they are not."""
        return self.zero_config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """After how many steps the engine logs a line; None means never."""
        return self.zero_config.steps_per_print

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss is scaled by a factor that follows the gradients."""
        return self.scaler is not None and self.scaler.dynamic

    def optimizer_name(self) -> str | None:
        """The optimizer that the JSON names, in lower case as in DeepSpeed."""
        kind = self.zero_config.optimizer.type
        return kind and kind.lower()

    def scheduler_name(self) -> str | None:
        """The schedule that the JSON names."""
        return self.zero_config.scheduler.type

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return [group["lr"] for group in self._groups()]

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate of all parameter groups, or of each one, for the next step.

        A schedule sets it anew after that step. Raises InputError for another number of rates.
        """
        groups = self._groups()
        rates = [*lr] if isinstance(lr, Sequence) else [lr] * len(groups)
        if len(rates) != len(groups):
            raise RefusedCall(
                f"set_lr got {len(rates)} rates for {len(groups)} parameter groups: give one each"
            )
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def get_mom(self) -> list[Any]:
        """Return the betas of each parameter group, or its momentum."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: `backward` and `step` average gradients."""

    def offload_states(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError: what is on the device stays there until the engine is gone."""
        raise RefusedCall(
            "engine.offload_states and reload_states are not available: offload_optimizer and "
            "offload_param in the JSON keep states on the host all the time; or save a checkpoint, "
            "delete the engine and the model, and load it into new ones"
        )

    reload_states = offload_states

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _set_batch(self, samples: int, micro_samples: int) -> None:
        if self._mid_step() or self._backwards:
            raise RefusedCall(
                "batch sizes can be changed between two steps, and this step has begun: call it "
                "after the engine.step() that updates the weights"
            )
        micro_batches = samples // (micro_samples * self.world_size)
        self.batch = type(self.batch)(samples, micro_samples, micro_batches)
        self.sharding.begin_micro_step(last=self.is_gradient_accumulation_boundary())
