"""What the engine writes and reads: checkpoints, and whole weights in 16 bit."""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zeropp.atomic import write_atomically
from zeropp.checkpoint import engine_checkpoint
from zeropp.checkpoint.gathered_weights import gather_weights, save_gathered_weights
from zeropp.deepspeed.utils.zero_to_fp32 import SCRIPT, SCRIPT_NAME
from zeropp.errors import RefusedCall
from zeropp.fsdp_adapter import WholeParameter
from zeropp.optim.sharded_optimizer import sharded
from zeropp.ranks.coordination import among, fail_together

log = logging.getLogger("zeropp")


def _among_its_ranks(method: Callable) -> Callable:
    """Let a method of the engine act among the ranks of the engine's mesh."""

    @functools.wraps(method)
    def on_mesh(engine: "EngineFiles", *args: Any, **kwargs: Any) -> Any:
        with among(engine.sharding.group), engine.sharding.as_shards():
            return method(engine, *args, **kwargs)

    return on_mesh


class EngineFiles:
    """The methods of `Engine` that touch files; of its other attributes they set the counters."""

    @_among_its_ranks
    def save_checkpoint(
        self,
        save_dir: Path | str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write `save_dir/tag` (by default global_stepN) on all ranks; return its path.

        Beside it is the script `zero_to_fp32.py`, which writes its whole weights in fp32.
        With `exclude_frozen_parameters`, only what is trained is written, and `load_checkpoint`
        leaves frozen parameters alone if it is called with `load_module_strict=False`.

        Between the micro-batches of a step, the state before that step is saved, with a warning:
        the gradients so far are not part of a checkpoint.

        Raises InputError as `zeropp.checkpoint.engine_checkpoint.save` does.
        """
        self._require_shards("save_checkpoint")
        if not save_dir:
            raise RefusedCall(
                f"save_checkpoint({save_dir!r}): give a folder, the same on all ranks"
            )
        if self._is_first and (self._mid_step() or self._backwards):
            log.warning(
                "save_checkpoint in the middle of a step: the gradients of its micro-batches so "
                "far are not saved, and it begins again where the checkpoint is loaded"
            )
        self.sharding.require_same_order()
        state = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "loss_scaler": self.scaler.state_dict() if self.scaler else {},
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler else {},
            "param_groups": _options(self.optimizer),
            "optimizer_saved": self.optimizer is not None,
            "client_state": dict(client_state),
        }
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        path = engine_checkpoint.save(
            Path(save_dir),
            tag,
            self.module,
            self.optimizer,
            state,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
        with fail_together():
            if self._is_first:
                _write_script(Path(save_dir) / SCRIPT_NAME)
        return path

    @_among_its_ranks
    def load_checkpoint(
        self,
        load_dir: Path | str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[Path | None, dict[str, Any] | None]:
        """Load a checkpoint on all ranks; return its path and its client_state.

        Without a tag, a folder that is missing or has no file `latest` gives (None, None) and a
        warning, as in DeepSpeed; nothing is changed then.
        Between the micro-batches of a step, its gradients are discarded and the step begins again.
        Raises InputError as `zeropp.checkpoint.engine_checkpoint.load` does.
        """
        self._require_shards("load_checkpoint")
        with_optimizer = load_optimizer_states and not load_module_only
        optimizer = self.optimizer if with_optimizer else None
        self.sharding.weights_changed()
        loaded = engine_checkpoint.load(
            Path(load_dir),
            tag,
            self.module,
            self.optimizer,
            strict=load_module_strict,
            with_optimizer_state=with_optimizer,
        )
        if loaded is None:
            return None, None
        path, state = loaded
        self._begin_step_again()
        if not load_module_only:
            self.global_steps, self.skipped_steps = state["global_steps"], state["skipped_steps"]
            self.global_samples = state.get(
                "global_samples", self.global_steps * self.batch.samples
            )
            self.micro_steps = self.global_steps * self.batch.micro_batches
        if optimizer is not None:
            _restore_options(optimizer, state["param_groups"], path)
            if self.scaler and state["loss_scaler"]:
                self.scaler.load_state_dict(state["loss_scaler"])
            self._tell_optimizer()
        with_scheduler = load_lr_scheduler_states and not load_module_only
        if with_scheduler and self.lr_scheduler and state["lr_scheduler"]:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        return path, state["client_state"]

    def _require_shards(self, call: str) -> None:
        if any(isinstance(each, WholeParameter) for each in self.module.parameters()):
            raise RefusedCall(
                f"{call} inside GatheredParameters, where parameters are whole and no shards: call "
                "it outside; a state may be loaded inside by engine.module.load_state_dict"
            )

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's whole state dict, without frozen parameters if that is asked for.

        All ranks must call it, as for `engine.module.state_dict()`.
        """
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    @_among_its_ranks
    def save_16bit_model(
        self,
        save_dir: Path | str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write the full 16-bit weights to one file from rank 0; all ranks must call it.

        A name ending in .safetensors selects that format. fp32 runs write bf16. Raises InputError
        if the file cannot be written.
        """
        path = Path(save_dir) / save_filename
        dtype = self.sharding.compute_dtype
        if dtype == torch.float32:
            dtype = torch.bfloat16
        try:
            save_gathered_weights(
                self.module,
                path,
                dtype,
                sharded(self.optimizer).masters,
                exclude_frozen=exclude_frozen_parameters,
            )
        except OSError as error:
            raise RefusedCall(f"cannot write {path}: {error}") from error
        return path

    def empty_partition_cache(self) -> None:
        """Free weights that passes without backward have left gathered, at stage 3."""
        self.sharding.release()

    @_among_its_ranks
    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole weights, in the computing format, on rank 0; None on other ranks.

        All ranks must call it.
        """
        masters = sharded(self.optimizer).masters
        weights = gather_weights(
            self.module,
            self.sharding.compute_dtype,
            masters,
            exclude_frozen=exclude_frozen_parameters,
        )
        return weights if self._is_first else None


def _write_script(path: Path) -> None:
    """Write the script beside a checkpoint, unless it is there."""
    if path.is_file() and path.read_text() == SCRIPT:
        return
    try:
        write_atomically(path, SCRIPT)
        path.chmod(0o755)
    except OSError as error:
        raise RefusedCall(f"cannot write {path}: {error}") from error


def _options(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return each parameter group's options, with the number of parameters as `params`."""
    groups = [] if optimizer is None else optimizer.param_groups
    options = [{**group, "params": len(group["params"])} for group in groups]
    for group in options:
        group.pop("param_names", None)
    return options


def _restore_options(
    optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]], path: Path
) -> None:
    sizes = [group["params"] for group in _options(optimizer)]
    saved_sizes = [group["params"] for group in saved]
    if sizes != saved_sizes:
        raise RefusedCall(
            f"the optimizer has parameter groups of {sizes} parameters, the one in {path} of "
            f"{saved_sizes}: build it with the same groups, or load with "
            "load_optimizer_states=False"
        )
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
