"""How fast the quantization kernels are beside memcpy of as many bytes, on one thread.

    python benchmarks/kernels.py [--elements N ...] [--rounds N] [--isa NAME] [--json FILE]

Every kernel is first compared with the plain-torch reference, byte by byte. Then kernel and memcpy
run in turn: memcpy copies half of what the kernel reads and writes together, so that both move the
same number of bytes, into memory that is there already. Times are the thread's processor time,
which leaves out waiting for a processor; a column gives the plain-torch reference's time as well.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.result import add_json, begin, finish, heading  # noqa: E402
from zeropp import reference  # noqa: E402
from zeropp.native import ISAS, Native, native  # noqa: E402
from zeropp.packing import Layout  # noqa: E402

ROWS = 8  # ranks that a gradient is cut for
SAMPLE_BYTES = 1 << 26  # at least so much is moved between two looks at the clock
CHECKED = 1 << 20  # elements


@dataclass(frozen=True, kw_only=True)
class Work:
    """A kernel, the same in plain torch, and the bytes read and written."""

    name: str
    run: Callable[[], None]
    wrote: Tensor
    expected: Callable[[], Tensor]
    num_bytes: int


def main() -> int:
    """Verify, time, print a table."""
    options = read_options()
    kernels = native()
    if kernels is None:
        sys.exit("error: there are no kernels to time; build them with make setup")
    if options.isa is not None and not kernels.use(options.isa):
        sys.exit(f"error: this processor has no {options.isa}; give one of {' '.join(ISAS)}")
    torch.set_num_threads(1)
    for work in works(kernels, CHECKED):
        verify(work)
    result = {
        **begin("kernels"),
        "isa": options.isa or next(name for name in reversed(ISAS) if kernels.use(name)),
        "rounds": options.rounds,
        "rows": [],
    }
    for elements in options.elements:
        result["rows"] += contest(works(kernels, elements), elements, options.rounds)
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--elements", type=int, nargs="+", default=(1 << 26, 1 << 17), metavar="N",
        help=f"multiples of {ROWS} (default: 2^26, beyond every cache, and 2^17, inside L2)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, help="samples of each (default: 15)")
    parser.add_argument("--isa", choices=ISAS, help="default: the best this processor has")
    add_json(parser)
    return parser.parse_args()


def works(kernels: Native, elements: int) -> list[Work]:
    """The kernels of a step's weights and gradients, over rows of one segment."""
    columns = elements // ROWS
    int8, int4 = (Layout(sizes=(columns,), bits=(bits,), wire=torch.bfloat16) for bits in (8, 4))
    wide = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(7))
    rows = wide.to(torch.bfloat16)
    codes = reference.quantize(rows[:1], int8, 1).repeat(ROWS, 1)
    kernels.quantize_into(rows, codes, int8, 1)
    back = torch.ones_like(rows)
    packed8 = torch.ones_like(codes)
    packed4 = torch.ones(ROWS, int4.packed_bytes, dtype=torch.uint8)

    def expected_back() -> Tensor:
        out = torch.empty_like(rows)
        reference.dequantize(codes, out, int8, 1)
        return out

    found = [
        Work(
            name="bf16 -> INT8", wrote=packed8, num_bytes=rows.nbytes + packed8.nbytes,
            run=lambda: kernels.quantize_into(rows, packed8, int8, 1),
            expected=lambda: reference.quantize(rows, int8, 1),
        ),
        Work(
            name="INT8 -> bf16", wrote=back, num_bytes=codes.nbytes + back.nbytes,
            run=lambda: kernels.dequantize(codes, back, int8, 1), expected=expected_back,
        ),
        Work(
            name="fp32 -> INT4, reordered", wrote=packed4, num_bytes=wide.nbytes + packed4.nbytes,
            run=lambda: kernels.quantize_into(wide, packed4, int4, 2),
            expected=lambda: reference.quantize(wide, int4, 2),
        ),
    ]  # fmt: skip
    for terms in (2, 4, 8):
        sums = torch.ones(ROWS // terms, int4.packed_bytes, dtype=torch.uint8)
        found.append(
            Work(
                name=f"{terms} x INT8 -> sum -> INT4", wrote=sums,
                num_bytes=codes.nbytes + sums.nbytes,
                run=lambda sums=sums: kernels.reduce_quantize_into(codes, sums, int8, int4),
                expected=lambda terms=terms: reference.reduce_quantize(codes, int8, int4, terms),
            )
        )  # fmt: skip
    return found


def verify(work: Work) -> None:
    """End the program unless the kernel writes the reference's bytes."""
    work.run()
    if not torch.equal(work.wrote, work.expected()):
        sys.exit(f"error: {work.name}: the kernel and the reference differ; nothing was timed")


def contest(works: list[Work], elements: int, rounds: int) -> list[dict]:
    """Time kernel and memcpy in turn; a row of the table for each kernel."""
    half = max(work.num_bytes for work in works) // 2
    source, target = (torch.ones(half, dtype=torch.uint8) for _ in range(2))
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    samples = [([], []) for _ in works]
    for number in range(rounds):
        for work, (own, others) in zip(works, samples, strict=True):
            size = work.num_bytes // 2
            runners = [
                (own, work.run),
                (others, lambda size=size: copy(target.data_ptr(), source.data_ptr(), size)),
            ]
            for seconds, run in runners if number % 2 else reversed(runners):
                seconds.append(clocked(run, max(1, SAMPLE_BYTES // work.num_bytes)))
    rows = []
    for work, (own, others) in zip(works, samples, strict=True):
        ratios = [other / each for each, other in zip(own, others, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        rows.append({
            "kernel": work.name, "elements": elements, "bytes": work.num_bytes,
            "gb_per_s": work.num_bytes / statistics.median(own) / 1e9,
            "memcpy_gb_per_s": work.num_bytes / statistics.median(others) / 1e9,
            "ratio": statistics.median(ratios),
            "quartiles": [quartiles[0], quartiles[2]],
            "reference_seconds": clocked(work.expected, 1), "seconds": own, "memcpy": others,
        })  # fmt: skip
    return rows


def clocked(run: Callable[[], None], times: int) -> float:
    """Processor seconds of this thread for one run."""
    start = time.thread_time()
    for _ in range(times):
        run()
    return (time.thread_time() - start) / times


def show(result: dict) -> None:
    """Print the table."""
    print(heading(result, "torch"))
    print(f"kernels: {result['isa']}, one thread; verified against the reference\n")
    print(
        f"  {'':24} {'elements':>10} {'GB/s':>6} {'memcpy':>6} {'ratio':>6}   "
        f"{'its quartiles':14} plain torch"
    )
    for row in result["rows"]:
        low, high = row["quartiles"]
        slower = row["reference_seconds"] / statistics.median(row["seconds"])
        print(
            f"  {row['kernel']:24} {row['elements']:10} {row['gb_per_s']:6.1f} "
            f"{row['memcpy_gb_per_s']:6.1f} {row['ratio']:6.2f}   {low:.2f} to {high:.2f}   "
            f"{slower:7.1f} x slower"
        )
    print("\nGB/s: bytes read and written; memcpy moves as many, half read and half written.")


if __name__ == "__main__":
    sys.exit(main())
