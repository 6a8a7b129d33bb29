"""DeepSpeed's ZeRO-3 for comparison, where installed; its ZeRO++ does not run without a GPU.

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8

It trains the same layers from the same weights with the same AdamW, unclipped, in bf16.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec

from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step.training_loops import Steps, model_loss_of
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.recipe.optimizer import adam_settings, parameter_groups
from zeropp.errors import InputError
from zeropp.optim.adam import fastest_adamw

INSTALL = "DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8"


def require_deepspeed() -> None:
    """Raise InputError unless DeepSpeed can be imported."""
    if find_spec("deepspeed") is None:
        raise InputError(
            f"--deepspeed: DeepSpeed is not installed in this environment. {INSTALL} installs it "
            "(needs setuptools and wheel)"
        )


def deepspeed_step(setup: TrainingSetup, steps: Steps) -> tuple[Callable[[], float], int]:
    """A step of DeepSpeed's engine at stage 3, and the number of parameters of its model."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed

    config = setup.config
    model = GPT(config.model, setup.vocab_size)
    initialize(model, config.training.seed, config.model)
    parameters = model.num_parameters()  # before DeepSpeed replaces them by empty tensors
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=fastest_adamw(parameter_groups(model), **adam_settings(config)),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": setup.shape["micro-batch"],
            "gradient_accumulation_steps": setup.micro_batches,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    loss_of = model_loss_of(engine)

    def step() -> float:
        total, batches = 0.0, next(steps)
        for batch in batches:
            loss = loss_of(batch)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(batches)
        return total

    return step, parameters
