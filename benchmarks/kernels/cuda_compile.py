"""What nvcc reports of the CUDA kernels: registers, shared memory, spills, and instructions.

    python -m benchmarks.kernels.cuda_compile [--instructions] [--results FILE.md]
        [--nvcc FILE --gpus sm_70]

Compiles every .cu file of csrc/ with setup.py's flags for sm_80 and sm_90, or for others that
another nvcc knows. No GPU is needed, as nothing runs. Warps are those that the registers let a
multiprocessor hold, in blocks of 256 threads (128 for steps of codes). Instructions are those that
nvdisasm shows on the way of a whole tile through kernels for sm_90. What they predict for an H200
(132 multiprocessors at 1.98 GHz, 4.8 TB/s) is no measurement: "at most" if warps hide each other's
waiting, "at least" if all those of a multiprocessor first wait 1.3 us for memory, as the kernels of
27 November 2026 nearly did.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kernels.instructions import cycles, executed, nvdisasm
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.result import ROOT
from benchmarks.shared.table import Column, table
from setup import CUDA_FLAGS, find_nvcc
from zeropp.errors import InputError

GPUS = ("sm_80", "sm_90")
SOURCES = tuple(sorted((ROOT / "csrc").glob("*/*.cu")))
THREADS = 256  # of a thread block
REGISTERS, WARPS = 65536, 64  # of a multiprocessor of sm_80 and sm_90
TILE, LANES, SCHEDULERS = 1024, 32, 4
H200, HERTZ, BANDWIDTH, WAIT = 132, 1.98e9, 4.8e12, 1.3e-6  # multiprocessors; bytes a second; s
# Cases of quantize_kernels: kernel, what a lane executes for a whole tile, bytes that it then waits
# for, and bytes of an element. A lane that divides by a scale has two multiply-adds for it.
CASES = json.loads((ROOT / "benchmarks/kernels/whole_tiles.json").read_text())
NAMES = {
    "Type": ("BF16", "FP16", "FP32"),
    "Width": ("INT8", "INT4", "INT3", "ROTATED4", "INT2", "ANY"),
}
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
    counted: dict[str, tuple[int, int]]  # case: instructions and a scheduler's cycles of a tile

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
        each for path in SOURCES for gpu in options.gpus
        for each in compiled(nvcc, path, gpu, counts=options.instructions and gpu == GPUS[-1])
    ]  # fmt: skip
    kernels.sort(key=lambda kernel: (kernel.gpu, kernel.name))
    result["gpus"] = list(options.gpus)
    result["kernels"] = [asdict(kernel) | {"warps": kernel.warps} for kernel in kernels]
    result["seconds"] = time.perf_counter() - started


def compiled(nvcc: str, source: Path, gpu: str, *, counts: bool = False) -> Iterator[Compiled]:
    """The kernels of a source; raises subprocess.CalledProcessError if it does not compile.

    counts: whether to count the instructions of `CASES`, which takes nvdisasm.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *CUDA_FLAGS, f"-arch={gpu}", "-Xptxas=-v", "-cubin", str(source)]
        command += ["-o", str(Path(folder, "out.cubin"))]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            sys.stderr.write(process.stderr)
            process.check_returncode()
        sections = []
        if counts:
            command = [nvdisasm(nvcc), "-c", command[-1]]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            sections = listing.split(".section\t.text.")[1:]
    code = {_readable(text.partition(",")[0]): text.partition("\t.section")[0] for text in sections}
    for match in _KERNEL.finditer(process.stderr):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        name = _readable(match["name"])
        ways = {
            each["case"]: executed(code[name], each["way"])
            for each in CASES
            if name in code and each["kernel"] == name
        }
        yield Compiled(
            name=name, gpu=gpu, threads=THREADS,
            registers=int(match["registers"]),
            shared=int(shared.group(1)) if shared else 0, stack=int(match["stack"]),
            spilled=int(match["stores"]) + int(match["loads"]),
            counted={case: (len(way), cycles(way)) for case, way in ways.items()},
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
    counted = [
        predicted(each, kernel)
        for each in CASES
        for kernel in result["kernels"]
        if each["case"] in kernel["counted"]
    ]
    columns = (
        Column("sm_90", "case"),
        Column("instructions an element, 512b3533", "before", ".1f"),
        Column("now", "instructions", ".1f"),
        Column("cycles an element, 512b3533", "cycles_before", ".1f"),
        Column("now", "cycles", ".1f"),
        Column("registers", "registers"),
        Column("KB in flight", "in_flight", ".0f", 1e-3),
        Column("predicted, of 4.8 TB/s: at least", "least", ".2f"),
        Column("at most", "most", ".2f"),
    )
    kernels = f"{table(counted, *columns)}\n\n{kernels}" if counted else kernels
    return (
        f"Flags `{' '.join(CUDA_FLAGS)}`; {len(result['gpus'])} architectures of {len(SOURCES)} "
        f"files in {result['seconds']:.0f} s.\n\n{kernels}"
    )


def predicted(case: dict, kernel: dict) -> dict:
    """What a case's counts and registers say of its speed on an H200."""
    instructions, busy = kernel["counted"][case["case"]]
    warps, moved = kernel["warps"], TILE * case["bytes"]
    in_flight = warps * LANES * case["at_once"]
    issue = busy * warps / SCHEDULERS / HERTZ  # seconds of a multiprocessor, a tile of each warp
    hidden, waited = (H200 / BANDWIDTH * moved * warps / each for each in (issue, WAIT + issue))
    return {
        **case,
        "instructions": instructions / LANES,
        "cycles": busy / LANES,
        "registers": kernel["registers"],
        "in_flight": in_flight,
        "least": min(1.0, waited),
        "most": min(1.0, hidden),
    }


def _readable(mangled: str) -> str:
    """`quantize_rows<BF16>` for its mangled name, if there is a c++filt."""
    if (demangler := shutil.which("c++filt")) is None:
        return mangled
    process = subprocess.run([demangler, mangled], capture_output=True, text=True, check=True)
    demangled = process.stdout.strip()
    name = re.search(r"(\w+(?:<[^<>]*>)?)\([^<>]*Job\)$", demangled)
    if name is None:
        return demangled
    return re.sub(r"\(zpp::(Type|Width)\)(\d)", lambda one: NAMES[one[1]][int(one[2])], name[1])


OPTIONS = (
    Flag("--instructions", False, "count them, which takes nvdisasm"),
    Flag("--nvcc", help="default: the one of setup.py"),
    Flag("--gpus", GPUS),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
