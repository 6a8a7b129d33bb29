"""How fast Adam on the CPU is, compared with PyTorch's Adam and with the machine's memory.

    python -m benchmarks.kernels.cpu_adam [--parameters N] [--threads N ...] [--rounds N]
        [--deepspeed] [--tensors flat|model] [--isa NAME] [--json FILE]

First our step is compared with the plain-torch reference, bit by bit, and with
`torch.optim.AdamW`. Then all steps run in turn on the same memory: weights, moments and gradients
are views of the same arrays, and every ratio is of two runs of one round.

"The sequence" is what a step of mixed precision takes without a fused kernel: gradients are divided
by the loss scale and multiplied by the clipping factor, `torch.optim.AdamW(fused=True)` updates,
and the new weights are copied to bf16. All its gradients are fp32, also where ours are bf16. "One
factor" is the same with one multiplication. The yardstick (memory_streams.cpp, compiled here with
g++) moves the same bytes as our step and computes nothing. Parameters are one flat tensor, as
ZeRO's shards in DeepSpeed are, or with `--tensors model` the matrices and vectors of a GPT.

With one thread, times are the thread's processor time, without waiting for a processor; with more,
they are wall-clock times. `--deepspeed` adds DeepSpeedCPUAdam, where it is installed.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.kernels.instruction_sets import use_isa
from benchmarks.shared.interleaved import ratio_summary, time_interleaved
from benchmarks.shared.result import begin, benchmark_parser, finish, heading
from benchmarks.shared.timers import THREAD_CLOCK, WALL_CLOCK, CpuTimer
from zeropp.native.kernels import ISAS
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for, reference
from zeropp.optim.cpu_adam import CPUAdam

ROOT = Path(__file__).resolve().parents[2]
CHECKED = 1_000_000  # parameters
CLOSE = 1e-6  # of the largest weight, to torch's after CHECKED_STEPS
CHECKED_STEPS = 3
Steps = dict[str, Callable[[], object]]  # by name
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
    apart = verify_against_torch()
    isa = options.isa or next(name for name in reversed(ISAS) if use_isa(name))
    result = begin(__spec__.name)
    result |= {"isa": isa, "rounds": options.rounds, "apart": apart, "runs": []}
    memory = Memory(options.parameters, options.tensors == "flat")
    result |= {"parameters": memory.size, "tensors": len(memory.shapes)}
    yardstick = compile_yardstick()
    for threads in options.threads:
        torch.set_num_threads(threads)
        steps = {**our_steps(memory), **yardsticks(memory, yardstick, threads)}
        steps |= torch_steps(memory)
        if options.deepspeed:
            steps |= deepspeed_steps(memory, threads)
        result["runs"].append(time_steps(steps, memory, threads, options.rounds))
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
    """Exit unless the kernel gives the reference's bits."""
    draw = torch.Generator().manual_seed(3)
    parts = [torch.randn(CHECKED, generator=draw) for _ in range(4)]
    parts[3] = parts[3].square() * 1e-3
    types = (torch.float32, gradient, moment, moment)
    inputs = [part.to(dtype) for part, dtype in zip(parts, types, strict=True)]
    mine, right = (
        Arrays(*[[part.clone()] for part in inputs], [torch.zeros(CHECKED, dtype=torch.bfloat16)])
        for _ in range(2)
    )
    settings = AdamSettings(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7, seed=1
    )
    adam(mine, torch.tensor(0.37), settings)
    reference(right, torch.tensor(0.37), settings.scalars())
    for name, result, expected in zip(Arrays._fields, mine, right, strict=True):
        if not torch.equal(result[0], expected[0]):
            sys.exit(f"error: the {name} differ from the reference's; nothing was timed")


def verify_against_torch() -> float:
    """The largest difference from torch's weights, relative to the largest; exits if too large."""
    draw = torch.Generator().manual_seed(4)
    start = torch.randn(CHECKED, generator=draw)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = CPUAdam([mine], **OPTIONS), torch.optim.AdamW([theirs], **OPTIONS, fused=True)
    for _ in range(CHECKED_STEPS):
        mine.grad = theirs.grad = torch.randn(CHECKED, generator=draw)
        for optimizer in optimizers:
            optimizer.step()
    apart = float(((mine - theirs).abs().max() / theirs.abs().max()).detach())
    if not apart <= CLOSE:
        sys.exit(f"error: weights are {apart:.1e} away from torch's; nothing was timed")
    return apart


class Memory:
    """The arrays that all steps work on, and views of them as parameters of a model."""

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
        owned = [nn.Parameter(view) for view in self.views(self.weights)]
        for parameter, gradient in zip(owned, self.views(gradients), strict=True):
            parameter.grad_dtype = None  # any
            parameter.grad = gradient
        return owned

    def give_state(self, optimizer: torch.optim.Optimizer, means: Tensor, squares: Tensor) -> None:
        """Give an optimizer over all parameters the moments, as after one step."""
        owned = optimizer.param_groups[0]["params"]
        for parameter, mean, square in zip(
            owned, self.views(means), self.views(squares), strict=True
        ):
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0), "exp_avg": mean, "exp_avg_sq": square,
            }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arrays that one of our steps reads and writes."""

    gradients: Tensor
    means: Tensor
    squares: Tensor
    copies: Tensor | None

    def bytes_per_parameter(self) -> int:
        """Gradients are read; fp32 weights and moments are read and written; copies written."""
        copies = 0 if self.copies is None else self.copies.itemsize
        read_and_written = torch.float32.itemsize + self.means.itemsize + self.squares.itemsize
        return self.gradients.itemsize + 2 * read_and_written + copies


def our_cases(memory: Memory) -> dict[str, Case]:
    """The cases of our step by name."""
    fp32 = {"means": memory.means, "squares": memory.squares}
    bf16 = {"means": memory.means16, "squares": memory.squares16}
    copies, narrow = memory.copies, memory.gradients16
    return {
        "ours": Case(gradients=memory.gradients, copies=None, **fp32),
        "ours, fp32 gradients, copy": Case(gradients=memory.gradients, copies=copies, **fp32),
        "ours, bf16 gradients, copy": Case(gradients=narrow, copies=copies, **fp32),
        "ours, bf16 gradients and moments, copy": Case(gradients=narrow, copies=copies, **bf16),
    }


def our_steps(memory: Memory) -> Steps:
    """Our steps."""
    factor, steps = torch.tensor(1.0), {}
    for name, case in our_cases(memory).items():
        owned, copies = memory.parameters(case.gradients), None
        if case.copies is not None:
            copies = dict(zip(owned, memory.views(case.copies), strict=True))
        wide = case.means.dtype == torch.float32
        optimizer = CPUAdam(owned, **OPTIONS, copies=copies, fp32_optimizer_states=wide)
        memory.give_state(optimizer, case.means, case.squares)
        steps[name] = partial(optimizer.step, factor=factor)
    return steps


def torch_steps(memory: Memory) -> Steps:
    """PyTorch's steps, alone and with the multiplications and the copy around them."""
    gradients, copies = memory.views(memory.gradients), memory.views(memory.copies)
    owned = memory.parameters(memory.gradients)
    fused = torch.optim.AdamW(owned, **OPTIONS, fused=True)
    plain = torch.optim.Adam(owned, lr=1e-5, foreach=False)
    for optimizer in (fused, plain):
        memory.give_state(optimizer, memory.means, memory.squares)

    def sequence(factors: int) -> None:
        for _ in range(factors):
            torch._foreach_mul_(gradients, 1.0)
        fused.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, owned)

    return {
        "the sequence": partial(sequence, 2),
        "one factor": partial(sequence, 1),
        "torch AdamW, fused": fused.step,
        "torch Adam, foreach=False": plain.step,
    }


def deepspeed_steps(memory: Memory, threads: int) -> Steps:
    """DeepSpeed's step, alone and followed by the copy to bf16 that it does not write."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)  # not torch's own copy
    owned, copies = memory.parameters(memory.gradients), memory.views(memory.copies)
    optimizer = DeepSpeedCPUAdam(owned, **OPTIONS)
    memory.give_state(optimizer, memory.means, memory.squares)
    for state in optimizer.state.values():
        state["step"] = 1

    def with_copy() -> None:
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, owned)

    return {"DeepSpeedCPUAdam": optimizer.step, "DeepSpeedCPUAdam, copy": with_copy}


def yardsticks(memory: Memory, run: Callable[..., None], threads: int) -> Steps:
    """A loop over the same arrays as each of our steps."""
    steps = {}
    for name, case in our_cases(memory).items():
        arrays = (case.gradients, memory.weights, case.means, case.squares, case.copies)
        pointers = [None if array is None else array.data_ptr() for array in arrays]
        sizes = (memory.size, case.gradients.itemsize, case.means.itemsize)
        steps[f"yardstick: {name}"] = partial(run, *pointers, *sizes, 0, threads)
    return steps


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


def time_steps(steps: Steps, memory: Memory, threads: int, rounds: int) -> dict:
    """Time all in turn; medians, and ratios round by round."""
    for run in steps.values():
        run()
    timer = CpuTimer(THREAD_CLOCK) if threads == 1 else CpuTimer(WALL_CLOCK)
    seconds = time_interleaved(steps, rounds, timer.seconds)
    cases, rows = our_cases(memory), []
    for name, times in seconds.items():
        row = {"name": name, "ms": statistics.median(times) * 1e3, "of_yardstick": None}
        if name in cases:
            num_bytes = cases[name].bytes_per_parameter() * memory.size
            row["gb_per_s"] = num_bytes / statistics.median(times) / 1e9
            row["of_yardstick"] = ratio_summary(seconds[f"yardstick: {name}"], times)
        rows.append(row)
    ratios = [
        {"ours": mine, "other": other, **ratio_summary(seconds[other], seconds[mine])}
        for mine, other in RATIOS
        if other in seconds
    ]
    return {"threads": threads, "rows": rows, "ratios": ratios, "seconds": seconds}


def show(result: dict) -> None:
    """Print the tables."""
    print(heading(result, "torch"))
    print(
        f"{result['parameters'] / 1e6:.1f} M parameters, tensors: {result['tensors']}; kernel: "
        f"{result['isa']}; equal to the reference bit for bit, "
        f"to torch's AdamW within {result['apart']:.0e}"
    )
    for run in result["runs"]:
        clock = "processor time" if run["threads"] == 1 else "time by the clock"
        print(f"\nthreads: {run['threads']} ({clock})")
        for row in run["rows"]:
            line = f"  {row['name']:52} {row['ms']:8.1f} ms"
            if row["of_yardstick"]:
                share = row["of_yardstick"]
                low, high = share["quartiles"]
                line += (
                    f" {row['gb_per_s']:6.1f} GB/s {100 * share['ratio']:5.0f}% of the yardstick's "
                    f"({100 * low:.0f} to {100 * high:.0f})"
                )
            print(line)
        print("\n  times as fast, median and quartiles")
        for pair in run["ratios"]:
            low, high = pair["quartiles"]
            print(
                f"  {pair['ours']:40} than {pair['other']:28} {pair['ratio']:5.2f}   "
                f"{low:.2f} to {high:.2f}"
            )


if __name__ == "__main__":
    sys.exit(main())
