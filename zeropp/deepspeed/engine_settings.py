"""What programs ask an engine about its settings, and what they may change between steps."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

from zeropp.errors import RefusedCall


def _asks(where: str, then: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Any]:
    """Return a method of an engine that returns what is at `where` in it, or what that means."""
    read = attrgetter(where)

    def ask(engine: "EngineSettings") -> Any:
        return then(read(engine))

    ask.__doc__ = f"Return what the engine's `{where}` says."
    return ask


class EngineSettings:
    """The methods of `Engine` that return or set what the JSON said."""

    train_batch_size = _asks("batch.samples")
    """Samples of a step, on all ranks."""
    train_micro_batch_size_per_gpu = _asks("batch.micro_samples")
    """Samples of a micro-batch, on one rank."""
    gradient_accumulation_steps = _asks("batch.micro_batches")
    """Micro-batches of a step."""
    get_batch_info = _asks("batch", tuple)
    """The samples of a step, those of a micro-batch, and the micro-batches of a step."""
    zero_optimization = _asks("sharding.stage", lambda stage: stage > 0)
    """Whether the ZeRO stage is 1 or more."""
    zero_optimization_stage = _asks("sharding.stage")
    """The ZeRO stage, 0 to 3."""
    zero_optimization_partition_gradients = _asks("sharding.stage", lambda stage: stage > 1)
    """Whether the ZeRO stage is 2 or more."""
    zero_optimization_partition_weights = _asks("sharding.stage", lambda stage: stage > 2)
    """Whether the ZeRO stage is 3."""
    fp16_enabled = _asks("zero_config.fp16.enabled")
    """Whether forward and backward compute in float16."""
    bfloat16_enabled = _asks("zero_config.bf16.enabled")
    """Whether forward and backward compute in bfloat16."""
    gradient_clipping = _asks("zero_config.gradient_clipping")
    """The norm to which gradients are clipped; 0 means that they are not."""
    steps_per_print = _asks("zero_config.steps_per_print")
    """After how many steps the engine logs a line; None means never."""
    managed_gradient_accumulation = _asks("zero_config.managed_gradient_accumulation")
    """Whether the engine counts the micro-batches of a step."""
    zero_gather_16bit_weights_on_model_save = _asks(
        "zero_config.zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
    """Whether the JSON's `stage3_gather_16bit_weights_on_model_save` is set."""
    dynamic_loss_scale = _asks("scaler", lambda scaler: scaler is not None and scaler.dynamic)
    """Whether the loss is scaled by a factor that follows the gradients."""
    optimizer_name = _asks("zero_config.optimizer.type", lambda kind: kind and kind.lower())
    """The optimizer that the JSON names, in lower case as in DeepSpeed."""
    scheduler_name = _asks("zero_config.scheduler.type")
    """The schedule that the JSON names."""
    was_step_applied = _asks("_was_applied")
    """Whether the last `step()` updated the weights."""
    get_global_grad_norm = _asks("_grad_norm")
    """The L2 norm of the last step's gradients before clipping; None before a step."""

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
