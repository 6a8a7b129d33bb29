"""Classify images, as a program written for DeepSpeed does: the loop of its CIFAR-10 example.

zeropp --num_ranks 2 examples/deepspeed/image_classifier.py --deepspeed --stage 2
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zeropp import deepspeed
from zeropp.deepspeed.accelerator import get_accelerator

CLASSES, SIDE = 10, 16  # side of an image, in pixels


def arguments() -> argparse.Namespace:
    """Return the program's own flags, and DeepSpeed's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="fp32")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=0)
    return deepspeed.add_config_arguments(parser).parse_args()


def configuration(args: argparse.Namespace) -> dict:
    """Return DeepSpeed's configuration as a dict."""
    schedule = {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 5}
    return {
        "train_batch_size": 16,
        "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.8, 0.999]}},
        "scheduler": {"type": "WarmupLR", "params": schedule},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 10},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50_000_000,
            "reduce_bucket_size": 50_000_000,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def images() -> TensorDataset:
    """Return images with a bright row that tells the class, in noise."""
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (512,))
    pixels = 0.5 * torch.randn(512, 3, SIDE, SIDE)
    pixels[torch.arange(512), :, labels] += 1
    return TensorDataset(pixels, labels)


def main() -> None:
    """Train, and print the first and the last loss."""
    args = arguments()
    deepspeed.init_distributed()
    get_accelerator().set_device(max(args.local_rank, 0))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=images(),
        config=configuration(args),
    )  # fmt: skip
    device = get_accelerator().device_name(engine.local_rank)
    dtype = None
    if engine.bfloat16_enabled():
        dtype = torch.bfloat16
    elif engine.fp16_enabled():
        dtype = torch.half
    losses = []
    while len(losses) < args.steps:
        for inputs, labels in loader:
            outputs = engine(inputs.to(device, dtype))
            loss = nn.functional.cross_entropy(outputs.float(), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if len(losses) == args.steps:
                break
    if engine.global_rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
