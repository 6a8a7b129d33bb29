"""Train two networks against each other, as DeepSpeed's GAN example does: two engines.

zeropp --num_ranks 2 examples/deepspeed/gan.py --deepspeed_config examples/deepspeed/gan.json
"""

import argparse

import torch
from torch import nn

from zeropp import deepspeed

NOISE, SIZE, SAMPLES = 8, 4, 32  # numbers of a noise vector and of a sample; samples of a batch


def arguments() -> argparse.Namespace:
    """Return the program's flags, and DeepSpeed's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def network(*sizes: int) -> nn.Sequential:
    """Return linear layers of these sizes with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def engine_of(args: argparse.Namespace, net: nn.Module) -> tuple:
    """Return an engine and its optimizer."""
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, betas=(0.5, 0.999))
    return deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), optimizer=optimizer
    )[:2]


def main() -> None:
    """Train, and print how far the generated samples' mean is from the real one's."""
    args = arguments()
    torch.manual_seed(0)
    discriminator, _ = engine_of(args, network(SIZE, 64, 64, 1))
    generator, _ = engine_of(args, network(NOISE, 64, 64, SIZE))
    device = discriminator.device
    torch.manual_seed(1 + discriminator.global_rank)
    target = torch.linspace(-1, 1, SIZE, device=device)
    ones, zeros = torch.ones(SAMPLES, 1, device=device), torch.zeros(SAMPLES, 1, device=device)
    criterion = nn.BCEWithLogitsLoss()
    distances = []
    for _ in range(args.steps):
        discriminator.zero_grad()
        real = target + 0.1 * torch.randn(SAMPLES, SIZE, device=device)
        discriminator.backward(criterion(discriminator(real), ones))
        fake = generator(torch.randn(SAMPLES, NOISE, device=device))
        discriminator.backward(criterion(discriminator(fake.detach()), zeros))
        discriminator.step()

        generator.zero_grad()
        generator.backward(criterion(discriminator(fake), ones))
        generator.step()
        distances.append((fake.detach().mean(0) - target).norm().item())
    if discriminator.global_rank == 0:
        print(f"distance {distances[0]:.3f} -> {distances[-1]:.3f}")


if __name__ == "__main__":
    main()
