"""The tables of benchmarks.convergence.numerics as Markdown."""

from collections.abc import Callable, Iterable

from benchmarks.shared.table import markdown_table
from zeropp.quant.packing import BLOCK

DATA = ("Gaussian", "weights", "gradients")
SECTIONS: tuple[tuple[str, Callable[[dict], bool]], ...] = (
    ("Block sizes", lambda row: (row["code"], row["scale"]) == ("signed", "bf16")),
    (
        "Types of scales",
        lambda row: (row["code"], row["block"]) == ("signed", BLOCK[row["bits"]]),
    ),
    ("Codes", lambda row: (row["scale"], row["block"]) == ("bf16", BLOCK[row["bits"]])),
    ("Scales of one byte, powers of two", lambda row: row["scale"] == "2^n"),
)


def tables(result: dict) -> str:
    """A description of the data, and every table."""
    sizes = ", ".join(f"{name} {count:,}" for name, count in result["elements"].items())
    lines = [
        "Before the measurement the PyTorch model of zeropp's format gave exactly the numbers of "
        f"its ops. The GPT was trained by pretrain_gpt.py's own step, with `{result['model']}`. "
        f"Elements: {sizes}. Weights and gradients are those of a GPT after {result['steps']} "
        f"steps (loss {result['loss']:.3f}), without one-dimensional parameters. Error: relative "
        "L2. Gain: of the least-squares fit over all tensors; in brackets that of the tensor "
        "furthest from 1. **Bold**: what zeropp uses.",
        "",
    ]
    for bits in (8, 4):
        for title, belongs in SECTIONS:
            rows = [row for row in result["one_hop"] if row["bits"] == bits and belongs(row)]
            lines += [f"## INT{bits}: {title[0].lower()}{title[1:]}", "", one_hop(rows), ""]
    lines += ["## Two hops", "", two_hops(result["two_hops"]), ""]
    return "\n".join(lines)


def one_hop(rows: Iterable[dict]) -> str:
    """A table of schemes."""
    columns = ["code", "scale", "block", "bytes"]
    columns += [f"{quantity}, {name}" for quantity in ("error", "gain") for name in DATA]
    lines = []
    for row in sorted(rows, key=lambda row: row["block"]):
        errors = [row["errors"][name] for name in DATA]
        cells = [row["code"], row["scale"], str(row["block"]), f"{row['bytes']:.4f}"]
        cells += [f"{each['error']:.3%}" for each in errors]
        cells += [_gain(each) for each in errors]
        lines.append(_bold(cells) if is_zeropp(row) else cells)
    return markdown_table(columns, lines)


def two_hops(rows: Iterable[dict]) -> str:
    """A table of pairs of widths."""
    lines = []
    for row in rows:
        cells = [f"{row['bits'][0]}, {row['bits'][1]}", row["data"], f"{row['error']:.2%}"]
        cells += [f"{row['expected']:.2%}", f"{row['cosine']:.5f}", _gain(row)]
        lines.append(_bold(cells) if tuple(row["bits"]) == (8, 4) else cells)
    return markdown_table(["bits", "data", "error", "expected", "cosine", "gain"], lines)


def is_zeropp(row: dict) -> bool:
    """Whether a row shows the scheme that zeropp uses."""
    chosen = ("signed", "bf16", BLOCK[row["bits"]])
    return (row["code"], row["scale"], row["block"]) == chosen


def _gain(errors: dict) -> str:
    return f"{errors['gain']:.4f} ({errors['worst_gain']:.4f})"


def _bold(cells: Iterable[str]) -> list[str]:
    return [f"**{cell}**" for cell in cells]
