"""A program on two ranks: Hugging Face's Trainer with `deepspeed=`, at several accumulations.

It prints a line of JSON: for each run its losses, and the number of updates. accelerate joins
DeepSpeed's ranks only where they have GPUs, so it is told here which of its ways to train is meant.
The ranks are forked from this process, so that the libraries are imported once.
"""

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from tests.zeropp.integrations.transformers_run import llama, samples

STEPS, SAVED, RESUMED_STEPS = 2, 2, 4
AUTO = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"} | {
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"
}  # fmt: skip
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
ZERO3 = AUTO | {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": OPTIMIZER,
}
WITH_SCHEDULE = ZERO3 | {"scheduler": {"type": "WarmupLR", "params": WARMUP}}
ZERO2 = AUTO | {"zero_optimization": {"stage": 2}}


def arguments(
    folder: Path, config: dict | None, accumulation: int, steps: int, saves: bool
) -> TrainingArguments:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    made = TrainingArguments(
        str(folder),
        deepspeed=config,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps" if saves else "no",
        save_steps=SAVED,
        report_to=[],
        disable_tqdm=True,
    )
    assert made.device.type == "cpu"  # starts accelerate
    if config is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    return made


def train(
    folder: Path,
    config: dict | None,
    accumulation: int = 1,
    *,
    steps: int = STEPS,
    pretrained: str | None = None,
    saves: bool = False,
    **how: str,
) -> tuple[Trainer, list[float]]:
    made = arguments(folder, config, accumulation, steps, saves)
    model = LlamaForCausalLM.from_pretrained(pretrained) if pretrained else llama()
    trainer = Trainer(model, made, train_dataset=samples())
    trainer.train(**how)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: Path) -> None:
    results = {}
    for accumulation in (1, 4):
        for name, config in (("plain", None), ("stage 2", ZERO2), ("stage 3", ZERO3)):
            trainer, losses = train(folder, config, accumulation)
            updates = STEPS if config is None else trainer.deepspeed.global_steps
            results[f"{name}, {accumulation}"] = [losses, updates]
    whole = folder / "with a schedule"
    settings = (whole, WITH_SCHEDULE, 2)
    results["whole"] = train(*settings, steps=RESUMED_STEPS, saves=True)[1]
    middle, end = (str(whole / f"checkpoint-{step}") for step in (SAVED, RESUMED_STEPS))
    resumed = train(*settings, steps=RESUMED_STEPS, resume_from_checkpoint=middle)
    results["resumed"] = resumed[1]
    for name, config in (("plain", None), ("stage 3", ZERO3)):
        results[f"from the saved weights, {name}"] = train(folder, config, pretrained=end)[1]
    if dist.get_rank() == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    gc.freeze()  # the trainer collects garbage after each run: not among what was imported
    two_ranks = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )  # fmt: skip
    elastic_launch(two_ranks, main)(Path(sys.argv[1]))
