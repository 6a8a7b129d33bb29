"""How fast a training run's messages are coded, how near to their entropy, beside nvCOMP's ANS.

Messages are of a small GPT in training: what a step changes in the INT8 codes of its weights at
several learning rates, and its gradients in INT4 and INT3. --messages keeps them in a file. Copies
of one are coded at once, and must arrive as they were. GB/s: of packed rows. Entropy: of single
codes or differences, and of single other bytes. nvCOMP (package nvidia-nvcomp-cu13, on a GPU) gets
differences, and two codes of INT3 in a byte.
"""

import importlib
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.codes.small_gpt import SmallGPT
from benchmarks.convergence.variants import FLAGS
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement, time_interleaved
from benchmarks.shared.table import Column, table
from benchmarks.shared.timers import WALL_CLOCK, CpuTimer, GpuTimer
from zeropp.quant.entropy_coder import coded_bytes, coding_of, decode, encode
from zeropp.quant.ops import quantize, requantize
from zeropp.quant.packing import ROTATED_4, row_layout
from zeropp.quant.rearranged import spread_threes

MODEL = f"{FLAGS} --hidden-size 256 --num-layers 2"
STEPS, SHARES = 40, (0.1, 0.55, 1.1, 2.4)  # of the learning rate, 3e-3
MOST = 1.05  # of the entropy
Message = tuple[int, int, Tensor, Tensor | None]  # codes, bits, row (P,), what is held of it


def record() -> list[Message]:
    """Train, and return what a step with each learning rate changes, and gradients."""
    with SmallGPT(MODEL, STEPS + 2) as gpt:
        for _ in range(STEPS):
            gpt.step()
        before = _blocks(gpt.matrices())
        gpt.step()
        change, gradients = _blocks(gpt.matrices()) - before, _blocks(gpt.gradients())
    size = before.numel()
    layouts = {bits: row_layout((size,), (bits,), torch.bfloat16) for bits in (8, ROTATED_4, 3)}
    held = quantize(before, layouts[8])
    weights = [requantize(before + share * change, held, layouts[8])[0] for share in SHARES]
    return [(size, 8, row, held[0]) for row in weights] + [
        (size, bits, quantize(gradients, layouts[bits])[0], None) for bits in (ROTATED_4, 3)
    ]


def measure(options: Options, result: dict) -> None:
    """Record, code, compare, time."""
    file = Path(options.messages)
    messages = torch.load(file) if file.is_file() else record()
    if options.messages and not file.is_file():
        torch.save(messages, file)
    device = torch.device(options.device)
    timer = GpuTimer(device) if device.type == "cuda" else CpuTimer(WALL_CLOCK)
    result |= {"device": options.device, "copies": options.copies, "rows": []}
    for message in messages:
        row: dict = {"codes": message[0], "bytes": len(message[2])}
        content, entropy = _content(message)
        row["message"] = f"INT{message[1] % 32}, {8 * entropy / message[0]:.2f} bits a code"
        works = _works(message, device, options.copies, row)
        works |= _nvcomp(content.to(device), options.copies, row) if device.type == "cuda" else {}
        times = time_interleaved(works, options.rounds, timer.seconds)
        size = row["bytes"] * options.copies
        row |= {name: size / statistics.median(each) / 1e9 for name, each in times.items()}
        row |= {f"of_{name}": row[name] / entropy for name in ("coded", "nvcomp") if name in row}
        result["rows"].append(row)


def _content(message: Message) -> tuple[Tensor, float]:
    """Return what a coder of bytes should get, uint8, and the entropy of single codes in bytes."""
    size, bits, row, held = message
    if held is not None:
        return row - held, _entropy(row - held)
    at = row_layout((size,), (bits,), torch.bfloat16).segments[0].data_at
    two = spread_threes(row[at : at + size * 3 // 8]) if bits == 3 else row[at:]
    codes = torch.cat([two & (1 << bits % 32) - 1, two >> bits % 32])
    return torch.cat((row[:at], two)), _entropy(row[:at]) + _entropy(codes)


def _works(message: Message, device: torch.device, copies: int, row: dict) -> dict:
    size, bits, *pair = message
    rows, held = (each if each is None else each.to(device).repeat(copies, 1) for each in pair)
    layout = row_layout((size,), (bits,), torch.bfloat16)
    coding = coding_of(layout, is_difference=held is not None)
    arrived = torch.zeros_like(rows) if held is None else held.clone()
    coded = rows.new_empty(copies, coded_bytes(coding))
    lengths, status = (torch.empty(copies, device=device).to(t) for t in (torch.int64, torch.int32))
    works = {
        "encode": lambda: encode(rows, coded, lengths, coding, held),
        "decode": lambda: decode(coded, lengths, arrived, status, coding),
    }
    for work in works.values():
        work()
    if status.any() or not torch.equal(arrived, rows):
        raise Disagreement(f"{row['message']}: what arrived is not what was sent")
    row["coded"] = int(lengths[0])
    return works


def _nvcomp(content: Tensor, copies: int, row: dict) -> dict:
    try:
        nvcomp = importlib.import_module("nvidia.nvcomp")
        stream = torch.cuda.current_stream().cuda_stream
        codec = nvcomp.Codec(algorithm="ANS", cuda_stream=stream)
        arrays = [nvcomp.as_array(each) for each in content.repeat(copies, 1)]
        coded = codec.encode(arrays)
        arrived = torch.from_dlpack(codec.decode(coded)[0]).view(torch.uint8)
        if not torch.equal(arrived.flatten(), content):
            raise RuntimeError("nvCOMP's ANS returned something else")
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        row["nvcomp_failed"] = f"{type(error).__name__}: {error}"
        return {}
    row["nvcomp"] = coded[0].buffer_size
    return {
        "nvcomp_encode": lambda: codec.encode(arrays),
        "nvcomp_decode": lambda: codec.decode(coded),
    }


def _blocks(tensors: dict[str, Tensor]) -> Tensor:
    """The matrices of all blocks (1, C)."""
    blocks = [each.flatten() for name, each in tensors.items() if name.startswith("blocks.")]
    return torch.cat(blocks).float().view(1, -1)


def _entropy(numbers: Tensor) -> float:
    """Bytes that uint8 numbers take one by one."""
    counts = torch.bincount(numbers.flatten().int()).double()
    shares = counts[counts > 0] / numbers.numel()
    return -float((shares * shares.log2()).sum()) * numbers.numel() / 8


def show(result: dict) -> str:
    """A line for each message."""
    names = ("of_coded", "encode", "decode", "of_nvcomp", "nvcomp_encode", "nvcomp_decode")
    words = ("of the entropy", "encode, GB/s", "decode, GB/s")
    titles = (*words, *(f"nvCOMP: {each}" for each in words))
    columns = [
        Column(title, lambda row, name=name: f"{row[name]:.3f}" if name in row else "-")
        for title, name in zip(titles, names, strict=True)
    ]
    first = Column("message", "message"), Column("bytes", "bytes"), Column("coded", "coded")
    failed = {row["nvcomp_failed"] for row in result["rows"] if "nvcomp_failed" in row}
    rows = table(result["rows"], *first, *columns)
    return "\n".join((f"{result['device']}, {result['copies']} copies at once\n", rows, *failed))


OPTIONS = (
    Flag("--messages", "", "file of recorded messages; written if it is not there"),
    Flag("--copies", 16, "of each message, coded at once", least=1),
    Flag("--rounds", 7, "samples of each", least=1),
)
BENCHMARK = Benchmark(
    __spec__, __doc__, measure, show, OPTIONS, has_device=True,
    succeeded=lambda result: all(row["of_coded"] <= MOST for row in result["rows"]),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
