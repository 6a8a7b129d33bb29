"""DeepSpeed's ZeRO-3 as a peer, where it is installed; its ZeRO++ does not run without a GPU.

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8

It trains the same layers from the same weights with the same AdamW, unclipped, in bf16.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from benchmarks.shared.setting import Setting
from megatron_zpp.data.loader import Batch
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.parallel.recipe import adam_settings, parameter_groups
from zeropp.errors import InputError
from zeropp.optim.adam import fastest_adamw

INSTALL = "DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8"


def require_deepspeed() -> None:
    """Raise InputError unless DeepSpeed can be imported."""
    if find_spec("deepspeed") is None:
        raise InputError(
            f"--deepspeed: it is not installed in this environment. {INSTALL} installs it "
            "(setuptools and wheel must be there)"
        )


def deepspeed_step(
    setting: Setting, feed: Iterator[Sequence[Batch]]
) -> tuple[Callable[[], float], int]:
    """A step of DeepSpeed's engine at stage 3, and its model's number of parameters."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed

    config = setting.config
    model = GPT(config.model, setting.vocab_size)
    initialize(model, config.training.seed, config.model)
    parameters = model.num_parameters()  # DeepSpeed leaves empty tensors in their place
    shape = dict(setting.shape)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=fastest_adamw(parameter_groups(model), **adam_settings(config)),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": shape["micro-batch"],
            "gradient_accumulation_steps": shape["micro-batches"],
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step() -> float:
        total, batches = 0.0, next(feed)
        for batch in batches:
            loss = engine(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(batches)
        return total

    return step, parameters
