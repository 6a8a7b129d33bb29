"""Prints `--bf16` where this machine multiplies bfloat16 matrices faster than float32 ones."""

import statistics
import sys
import time

try:
    import torch
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")
except (ImportError, OSError) as broken:
    sys.exit(
        f"error: torch is installed and cannot be imported ({broken}); give a Python without it or "
        "with another: make clean, then make setup PYTHON=python3.12"
    )

SIZE = 512  # rows and columns, about those of the small GPT of `make pretrain`
REPETITIONS = 3
MARGIN = 1.2  # a smaller speed-up is not worth the rounding


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    faster = seconds(torch.float32, device) > MARGIN * seconds(torch.bfloat16, device)
    print("--bf16" if faster else "")


def seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Median time of one product of two square matrices."""
    matrix = torch.randn(SIZE, SIZE, device=device).to(dtype)
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        (matrix @ matrix).float().sum().item()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
