"""What nvcc reports of the CUDA kernels: registers, shared memory, and register spills.

    python -m benchmarks.kernels.cuda_compile [--results FILE.md] [--nvcc FILE --gpus sm_70]

Compiles every .cu file of csrc/ with setup.py's flags for sm_80 and sm_90, or for others that
another nvcc knows. No GPU is needed, as nothing runs. Warps are those that the registers let a
multiprocessor hold, in blocks of 256 threads (128 for steps of codes).
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.result import ROOT
from benchmarks.shared.table import Column, table
from setup import CUDA_FLAGS, find_nvcc
from zeropp.errors import InputError

GPUS = ("sm_80", "sm_90")
SOURCES = tuple(sorted((ROOT / "csrc").glob("*/*.cu")))
THREADS = 256  # of a thread block
REGISTERS, WARPS = 65536, 64  # of a multiprocessor of sm_80 and sm_90
_KERNEL = re.compile(
    r"Function properties for (?P<name>\S+)\s+(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\s+"
    r"ptxas info\s*: Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A kernel as ptxas compiled it; sizes in bytes."""

    name: str
    gpu: str
    threads: int
    registers: int
    shared: int
    stack: int
    spilled: int

    @property
    def warps(self) -> int:
        """Warps that a multiprocessor has registers for."""
        each = -(-self.registers // 8) * 8  # registers are allocated in multiples of 8
        return min(WARPS, REGISTERS // (each * self.threads) * (self.threads // 32))


def measure(options: Options, result: dict) -> None:
    """Compile everything; raises InputError without a compiler."""
    nvcc = options.nvcc or find_nvcc()
    if nvcc is None:
        raise InputError("there is no nvcc to ask; install CUDA's toolkit, or set CUDA_HOME")
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    result["versions"]["nvcc"] = re.search(r"V([\d.]+)", output).group(1)
    started = time.perf_counter()
    kernels = [
        each for path in SOURCES for gpu in options.gpus for each in compiled(nvcc, path, gpu)
    ]
    kernels.sort(key=lambda kernel: (kernel.gpu, kernel.name))
    result["gpus"] = list(options.gpus)
    result["kernels"] = [asdict(kernel) | {"warps": kernel.warps} for kernel in kernels]
    result["seconds"] = time.perf_counter() - started


def compiled(nvcc: str, source: Path, gpu: str) -> Iterator[Compiled]:
    """The kernels of a source; raises subprocess.CalledProcessError if it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *CUDA_FLAGS, f"-arch={gpu}", "-Xptxas=-v", "-cubin", str(source)]
        command += ["-o", str(Path(folder, "out.cubin"))]
        process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        sys.stderr.write(process.stderr)
        process.check_returncode()
    for match in _KERNEL.finditer(process.stderr):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        yield Compiled(
            name=_readable(match["name"]), gpu=gpu, threads=THREADS,
            registers=int(match["registers"]),
            shared=int(shared.group(1)) if shared else 0, stack=int(match["stack"]),
            spilled=int(match["stores"]) + int(match["loads"]),
        )  # fmt: skip


def show(result: dict) -> str:
    """A line for each kernel."""
    kernels = table(
        result["kernels"],
        Column("kernel", lambda row: f"`{row['name']}`"),
        Column("GPU", "gpu"),
        Column("registers", "registers"),
        Column(f"warps of {WARPS}", "warps"),
        Column("shared, bytes", "shared"),
        Column("stack, bytes", "stack"),
        Column("spilled, bytes", "spilled"),
    )
    return (
        f"Flags `{' '.join(CUDA_FLAGS)}`; {len(result['gpus'])} architectures of {len(SOURCES)} "
        f"files in {result['seconds']:.0f} s.\n\n{kernels}"
    )


def _readable(mangled: str) -> str:
    """`quantize_rows<BF16>` for its mangled name, if there is a c++filt."""
    if (demangler := shutil.which("c++filt")) is None:
        return mangled
    process = subprocess.run([demangler, mangled], capture_output=True, text=True, check=True)
    demangled = process.stdout.strip()
    name = re.search(r"(\w+)(?:<\(zpp::Type\)(\d)>)?\([^<>]*Job\)$", demangled)
    if name is None:
        return demangled
    return name[1] + (f"<{('BF16', 'FP16', 'FP32')[int(name[2])]}>" if name[2] else "")


OPTIONS = (Flag("--nvcc", help="default: the one of setup.py"), Flag("--gpus", GPUS))
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
