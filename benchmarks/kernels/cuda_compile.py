"""What nvcc reports of the CUDA kernels: registers, shared memory, and register spills.

    python -m benchmarks.kernels.cuda_compile [--output FILE.md]

Compiles every .cu file of csrc/ with setup.py's flags for sm_80 and sm_90. No GPU is needed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.environment_report import environment_report
from benchmarks.shared.result import markdown_table, write_text
from setup import CUDA_FLAGS, find_nvcc

ROOT = Path(__file__).resolve().parents[2]
GPUS = ("sm_80", "sm_90")
SOURCES = tuple(sorted((ROOT / "csrc").glob("*/*.cu")))
THREADS, STEP_THREADS = 256, 128  # of a thread block; for steps of codes
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


def main() -> int:
    """Compile, print a table, and store it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("error: there is no nvcc to ask; install CUDA's toolkit, or set CUDA_HOME")
    started = time.perf_counter()
    kernels = []
    for source in SOURCES:
        for gpu in GPUS:
            kernels += compiled(nvcc, source, gpu)
    text = report(nvcc, kernels, time.perf_counter() - started)
    print(text)
    if options.output:
        write_text(options.output, text)
    return 0


def compiled(nvcc: str, source: Path, gpu: str) -> Iterator[Compiled]:
    """The kernels of a source; raises subprocess.CalledProcessError if it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *CUDA_FLAGS, f"-arch={gpu}", "-Xptxas=-v", "-cubin", str(source)]
        command += ["-o", str(Path(folder, "out.cubin"))]
        process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        sys.stderr.write(process.stderr)
        process.check_returncode()
    threads = STEP_THREADS if source.parent.name == "code_steps" else THREADS
    for match in _KERNEL.finditer(process.stderr):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        yield Compiled(
            name=_readable(match["name"]), gpu=gpu, threads=threads,
            registers=int(match["registers"]),
            shared=int(shared.group(1)) if shared else 0, stack=int(match["stack"]),
            spilled=int(match["stores"]) + int(match["loads"]),
        )  # fmt: skip


def report(nvcc: str, kernels: list[Compiled], seconds: float) -> str:
    """The dated Markdown."""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    around = environment_report()
    changed = " and what was not committed yet" if around["uncommitted"] else ""
    version = re.search(r"V([\d.]+)", output).group(1)
    columns = ["kernel", "GPU", "registers", "warps", "shared, bytes", "stack, bytes"]
    columns.append("spilled, bytes")
    rows = []
    for kernel in sorted(kernels, key=lambda kernel: (kernel.gpu, kernel.name)):
        sizes = (kernel.shared, kernel.stack, kernel.spilled)
        cells = [f"`{kernel.name}`", kernel.gpu, kernel.registers, f"{kernel.warps} of {WARPS}"]
        rows.append([str(cell) for cell in (*cells, *sizes)])
    return "\n".join(
        [
            f"# What nvcc reports of the CUDA kernels, {time.strftime('%-d %B %Y')}",
            "",
            "`python -m benchmarks.kernels.cuda_compile`, "
            f"commit {around['commit'][:12]}{changed}; "
            f"nvcc {version}, flags "
            f"`{' '.join(CUDA_FLAGS)}`; {len(GPUS)} architectures of {len(SOURCES)} files in "
            f"{seconds:.0f} s. Nothing ran: there was no GPU. Warps are those that the registers "
            f"let a multiprocessor hold, in blocks of {THREADS} threads ({STEP_THREADS} for steps "
            "of codes).",
            "",
            markdown_table(columns, rows),
            "",
        ]
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


if __name__ == "__main__":
    sys.exit(main())
