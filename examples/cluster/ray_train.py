"""Train a small model under Ray Train, with ZeRO++ between the workers.

    pip install "ray[train]"
    python examples/cluster/ray_train.py --workers 2

Ray starts the workers and joins them; `zeropp.initialize` uses the process group that it finds. On
GPUs, say so with `--use_gpu`.
"""

import argparse

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import zeropp

SIZE, CLASSES = 64, 10
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
}


def samples_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs whose largest of the first elements is the class."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(16, SIZE, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(1)


def train(settings: dict) -> None:
    """Train on one worker, and report the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(SIZE, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES)
    )
    engine, *_ = zeropp.initialize(model=model, config=CONFIG)
    for step in range(settings["steps"]):
        inputs, classes = samples_of(step, engine.global_rank)
        outputs = engine(inputs.to(engine.device))
        loss = nn.functional.cross_entropy(outputs, classes.to(engine.device))
        engine.backward(loss)
        engine.step()
        if step in (0, settings["steps"] - 1):
            ray.train.report({"loss": loss.item(), "step": engine.global_steps})
            if engine.global_rank == 0:
                print(f"step {engine.global_steps}, loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--use_gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    workers = ScalingConfig(num_workers=args.workers, use_gpu=args.use_gpu)
    settings = {"steps": args.steps}
    TorchTrainer(train, train_loop_config=settings, scaling_config=workers).fit()


if __name__ == "__main__":
    main()
