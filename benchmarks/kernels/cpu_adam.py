"""How fast Adam on the CPU is, compared with PyTorch's and with the machine's memory.

    python -m benchmarks.kernels.cpu_adam [--parameters N] [--threads N ...] [--rounds N]
        [--deepspeed] [--tensors flat|model] [--isa NAME] [--json FILE]

First our step is compared with the plain-torch reference, bit by bit, and with
`torch.optim.AdamW`. Then all optimizers run in turn on the same memory: weights, moments and
gradients are views of the same arrays, and every ratio is of two runs in the same round.

"The sequence" is a mixed-precision step without a fused kernel: gradients are divided by the loss
scale and multiplied by the clipping factor, `torch.optim.AdamW(fused=True)` updates, and the new
weights are copied to bf16. Its gradients are always fp32, also where ours are bf16. "One factor" is
the same with a single multiplication. The yardstick (memory_streams.cpp, compiled here
with g++) moves as many bytes and computes nothing. Parameters are one flat tensor, as ZeRO's
shards in DeepSpeed are, or with `--tensors model` matrices and vectors of a GPT.

With one thread, times are its processor time, which excludes waiting for a processor; with more,
wall-clock time. `--deepspeed` also times DeepSpeedCPUAdam, if it is installed.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.shared.result import begin, benchmark_parser, finish, heading
from zeropp.native.kernels import ISAS, use_isa
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for, reference
from zeropp.optim.cpu_adam import CPUAdam

ROOT = Path(__file__).resolve().parents[2]
CHECKED = 1_000_000  # parameters
CLOSE = 1e-6  # of the largest weight, to torch's after CHECKED_STEPS
CHECKED_STEPS = 3
SHAPES = ((1024, 4096), (4096, 1024), (1024, 1024), (1024,), (4096,))  # repeated
OPTIONS = dict(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
RATIOS = (
    ("ours, fp32 gradients, copy", "the sequence"),
    ("ours, fp32 gradients, copy", "one factor"),
    ("ours, bf16 gradients, copy", "the sequence"),
    ("ours, bf16 gradients, copy", "one factor"),
    ("ours", "torch AdamW, fused"),
    ("ours", "torch Adam, foreach=False"),
    ("ours, fp32 gradients, copy", "DeepSpeedCPUAdam, copy"),
    ("ours", "DeepSpeedCPUAdam"),
    ("ours, bf16 gradients and moments, copy", "ours, bf16 gradients, copy"),
)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """An optimizer's step; num_bytes: read and written per element, 0 if it is not ours."""

    name: str
    run: Callable[[], None]
    num_bytes: int = 0


def main() -> int:
    """Verify, time, print tables."""
    options = read_options()
    if kernel_for(torch.device("cpu")) is None:
        sys.exit("error: there are no kernels to time; build them with make setup")
    if options.isa is not None and not use_isa(options.isa):
        sys.exit(f"error: this processor has no {options.isa}; give one of {' '.join(ISAS)}")
    for gradient in (torch.float32, torch.bfloat16, torch.float16):
        for moment in (torch.float32, torch.bfloat16):
            verify_bits(gradient, moment)
    distance = distance_to_torch()
    isa = options.isa or next(name for name in reversed(ISAS) if use_isa(name))
    result = begin(__spec__.name)
    result |= {"isa": isa, "rounds": options.rounds, "distance": distance, "runs": []}
    memory = Memory(options.parameters, options.tensors == "flat")
    result |= {"parameters": memory.size, "tensors": len(memory.shapes)}
    yardstick = compile_yardstick()
    for threads in options.threads:
        torch.set_num_threads(threads)
        contestants = [*ours(memory), *yardsticks(memory, yardstick, threads), *torchs(memory)]
        if options.deepspeed:
            contestants += deepspeeds(memory, threads)
        result["runs"].append(time_steps(contestants, threads, options.rounds, memory.size))
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parameters", type=int, default=50_000_000, help="default: 50 million")
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2), help="default: 1 2")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each (default: 15)")
    parser.add_argument("--deepspeed", action="store_true", help="time DeepSpeedCPUAdam as well")
    parser.add_argument(
        "--tensors", choices=("flat", "model"), default="flat", help="default: flat"
    )
    parser.add_argument("--isa", choices=ISAS, help="default: the best this processor has")
    return parser.parse_args()


def verify_bits(gradient: torch.dtype, moment: torch.dtype) -> None:
    """End the program unless the kernel gives the reference's bits."""
    draw = torch.Generator().manual_seed(3)
    parts = [torch.randn(CHECKED, generator=draw) for _ in range(4)]
    parts[3] = parts[3].square() * 1e-3
    types = (torch.float32, gradient, moment, moment)
    inputs = [part.to(dtype) for part, dtype in zip(parts, types, strict=True)]
    ours, expected = (
        Arrays(*[[part.clone()] for part in inputs], [torch.zeros(CHECKED, dtype=torch.bfloat16)])
        for _ in range(2)
    )
    settings = AdamSettings(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7, seed=1
    )
    adam(ours, torch.tensor(0.37), settings)
    reference(expected, torch.tensor(0.37), settings.scalars())
    for name, (result,), (right,) in zip(Arrays._fields, ours, expected, strict=True):
        if not torch.equal(result, right):
            sys.exit(f"error: the {name} differ from the reference's; nothing was timed")


def distance_to_torch() -> float:
    """The largest difference from torch's weights, relative to the largest weight.

    Ends the program if it exceeds CLOSE.
    """
    draw = torch.Generator().manual_seed(4)
    start = torch.randn(CHECKED, generator=draw)
    ours, torchs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = CPUAdam([ours], **OPTIONS), torch.optim.AdamW([torchs], **OPTIONS, fused=True)
    for _ in range(CHECKED_STEPS):
        ours.grad = torchs.grad = torch.randn(CHECKED, generator=draw)
        for optimizer in optimizers:
            optimizer.step()
    distance = float(((ours - torchs).abs().max() / torchs.abs().max()).detach())
    if not distance <= CLOSE:
        sys.exit(f"error: weights differ from torch's by {distance:.1e}; nothing was timed")
    return distance


class Memory:
    """The arrays that all optimizers work on, and views of them as parameters of a model."""

    def __init__(self, parameters: int, flat: bool) -> None:
        shapes, self.size = ([(parameters,)], parameters) if flat else ([], 0)
        while self.size < parameters:
            shapes.append(SHAPES[len(shapes) % len(SHAPES)])
            self.size += torch.Size(shapes[-1]).numel()
        self.shapes = shapes
        draw = torch.Generator().manual_seed(5)
        self.weights = torch.randn(self.size, generator=draw)
        self.gradients = torch.randn(self.size, generator=draw)
        self.means = self.gradients * 0.1
        self.squares = self.gradients.square()
        self.gradients16 = self.gradients.bfloat16()
        self.copies = self.weights.bfloat16()
        self.means16, self.squares16 = self.means.bfloat16(), self.squares.bfloat16()

    def views(self, flat: Tensor) -> list[Tensor]:
        """An array as tensors of the model's shapes."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        pieces = zip(flat.split(sizes), self.shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]

    def parameters(self, gradients: Tensor) -> list[nn.Parameter]:
        """The weights with these gradients."""
        parameters = [nn.Parameter(view) for view in self.views(self.weights)]
        for parameter, gradient in zip(parameters, self.views(gradients), strict=True):
            parameter.grad_dtype = None  # any
            parameter.grad = gradient
        return parameters

    def give_state(
        self, optimizer: torch.optim.Optimizer, means: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Give the moments, as after one step, to an optimizer over all parameters."""
        means = self.means if means is None else means
        squares = self.squares if squares is None else squares
        parameters = optimizer.param_groups[0]["params"]
        for parameter, mean, square in zip(
            parameters, self.views(means), self.views(squares), strict=True
        ):
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0), "exp_avg": mean, "exp_avg_sq": square,
            }  # fmt: skip


def ours(memory: Memory) -> list[Contestant]:
    """Our steps."""
    factor = torch.tensor(1.0)

    def contestant(name: str, gradients: Tensor, num_bytes: int, *moments: Tensor) -> Contestant:
        parameters = memory.parameters(gradients)
        copies = dict(zip(parameters, memory.views(memory.copies), strict=True))
        optimizer = CPUAdam(
            parameters, **OPTIONS, copies=copies if name != "ours" else None,
            fp32_optimizer_states=not moments,
        )  # fmt: skip
        memory.give_state(optimizer, *moments)
        return Contestant(
            name=name, run=lambda: optimizer.step(factor=factor), num_bytes=num_bytes
        )

    halves = memory.means16, memory.squares16
    return [
        contestant("ours", memory.gradients, 28),
        contestant("ours, fp32 gradients, copy", memory.gradients, 30),
        contestant("ours, bf16 gradients, copy", memory.gradients16, 26),
        contestant("ours, bf16 gradients and moments, copy", memory.gradients16, 18, *halves),
    ]


def torchs(memory: Memory) -> list[Contestant]:
    """PyTorch's steps, alone and with what goes with them."""
    gradients, copies = memory.views(memory.gradients), memory.views(memory.copies)
    parameters = memory.parameters(memory.gradients)
    fused = torch.optim.AdamW(parameters, **OPTIONS, fused=True)
    plain = torch.optim.Adam(parameters, lr=1e-5, foreach=False)
    for optimizer in (fused, plain):
        memory.give_state(optimizer)

    def sequence(factors: int) -> None:
        for _ in range(factors):
            torch._foreach_mul_(gradients, 1.0)
        fused.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, parameters)

    return [
        Contestant(name="the sequence", run=lambda: sequence(2)),
        Contestant(name="one factor", run=lambda: sequence(1)),
        Contestant(name="torch AdamW, fused", run=fused.step),
        Contestant(name="torch Adam, foreach=False", run=plain.step),
    ]


def deepspeeds(memory: Memory, threads: int) -> list[Contestant]:
    """DeepSpeed's step, alone and followed by the copy to bf16 that it does not write."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)  # not the one that torch brings along
    parameters, copies = memory.parameters(memory.gradients), memory.views(memory.copies)
    optimizer = DeepSpeedCPUAdam(parameters, **OPTIONS)
    memory.give_state(optimizer)
    for state in optimizer.state.values():
        state["step"] = 1

    def with_copy() -> None:
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, parameters)

    return [
        Contestant(name="DeepSpeedCPUAdam", run=optimizer.step),
        Contestant(name="DeepSpeedCPUAdam, copy", run=with_copy),
    ]


def yardsticks(memory: Memory, run: Callable[..., None], threads: int) -> list[Contestant]:
    """A loop over the same arrays as each of `ours`."""
    wide = (memory.means, memory.squares)
    halves = (memory.means16, memory.squares16)
    kinds = (
        ("ours", memory.gradients, wide, None),
        ("ours, fp32 gradients, copy", memory.gradients, wide, memory.copies),
        ("ours, bf16 gradients, copy", memory.gradients16, wide, memory.copies),
        ("ours, bf16 gradients and moments, copy", memory.gradients16, halves, memory.copies),
    )

    def yardstick(
        name: str, gradients: Tensor, moments: Sequence[Tensor], copies: Tensor | None
    ) -> Contestant:
        arrays = (gradients, memory.weights, *moments)
        places = [array.data_ptr() for array in arrays] + [copies.data_ptr() if copies is not None
                                                           else None]
        sizes = (memory.size, gradients.itemsize, moments[0].itemsize)
        return Contestant(name=f"yardstick: {name}", run=lambda: run(*places, *sizes, 0, threads))

    return [yardstick(*kind) for kind in kinds]


def compile_yardstick() -> Callable[..., None]:
    """memory_streams.cpp for this processor."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "memory_streams.so"
        source = ROOT / "benchmarks" / "kernels" / "memory_streams.cpp"
        flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"]
        subprocess.run(["g++", *flags, str(source), "-o", str(built)], check=True)
        function = ctypes.CDLL(str(built)).streams
    number, place = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [place] * 5 + [number] * 3 + [ctypes.c_uint32, number]
    function.restype = None
    return function


def time_steps(contestants: list[Contestant], threads: int, rounds: int, size: int) -> dict:
    """Run all in turn, in reverse order every second round; medians and ratios."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    clock = time.thread_time if threads == 1 else time.perf_counter
    for contestant in contestants:
        contestant.run()
    for number in range(rounds):
        for contestant in contestants[:: -1 if number % 2 else 1]:
            start = clock()
            contestant.run()
            seconds[contestant.name].append(clock() - start)
    rows = []
    for contestant in contestants:
        name, num_bytes = contestant.name, contestant.num_bytes
        median = statistics.median(seconds[name])
        yardstick = spread(seconds[f"yardstick: {name}"], seconds[name]) if num_bytes else None
        rows.append({
            "name": name, "ms": median * 1e3, "gb_per_s": num_bytes * size / median / 1e9,
            "of_yardstick": yardstick,
        })  # fmt: skip
    ratios = [
        {"ours": ours, "other": other, **spread(seconds[other], seconds[ours])}
        for ours, other in RATIOS if other in seconds
    ]  # fmt: skip
    return {"threads": threads, "rows": rows, "ratios": ratios, "seconds": seconds}


def spread(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios, round by round."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": median, "low": low, "high": high}


def show(result: dict) -> None:
    """Print the tables."""
    print(heading(result, "torch"))
    print(
        f"{result['parameters'] / 1e6:.1f} M parameters, tensors: {result['tensors']}; kernel: "
        f"{result['isa']}; equal to the reference bit for bit, "
        f"to torch's AdamW within {result['distance']:.0e}"
    )
    for run in result["runs"]:
        clock = "processor time" if run["threads"] == 1 else "time by the clock"
        print(f"\nthreads: {run['threads']} ({clock})")
        for row in run["rows"]:
            line = f"  {row['name']:52} {row['ms']:8.1f} ms"
            if row["of_yardstick"]:
                share = {name: 100 * part for name, part in row["of_yardstick"].items()}
                line += (f" {row['gb_per_s']:6.1f} GB/s {share['median']:5.0f}% of the yardstick's "
                         f"({share['low']:.0f} to {share['high']:.0f})")  # fmt: skip
            print(line)
        print("\n  times as fast, median and quartiles")
        for ratio in run["ratios"]:
            print(f"  {ratio['ours']:40} than {ratio['other']:28} {ratio['median']:5.2f}   "
                  f"{ratio['low']:.2f} to {ratio['high']:.2f}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
