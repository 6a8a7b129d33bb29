"""Error of quantization against bytes per element, drawn as an SVG: a curve for each code."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.convergence.numerics_report import is_zeropp

WIDTH, HEIGHT = 960, 396  # pixels
TOP, BOTTOM = 44, 96  # margins of both panels
GRAY = "#808080"  # readable on white and on black, like the colours below
SERIES = (  # code, scale, label, colour
    ("signed", "bf16", "signed extreme, bf16 scale (used)", "#e8710a"),
    ("signed", "fp32", "signed extreme, fp32 scale", "#d6568f"),
    ("clipped", "bf16", "2 max / 2^b, clipped", "#a06be0"),
    ("half-step", "bf16", "half a step off", "#2ea36f"),
    ("symmetric", "bf16", "max / (2^(b-1) - 1), to nearest", "#4c8bf5"),
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel from pixel `left` to `right`, and the ranges of its axes."""

    bits: int
    data: str
    left: int
    right: int
    bytes: tuple[float, float]
    errors: tuple[float, float]

    def place(self, num_bytes: float, error: float) -> tuple[float, float]:
        """The pixel of a point; both axes are logarithmic, the x-axis in bytes of the scales."""
        across, up = _share(num_bytes - self.bits / 8, self.bytes), _share(error, self.errors)
        x = self.left + across * (self.right - self.left)
        return x, HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def draw(result: dict) -> str:
    """The SVG: INT8 on weights and INT4 on gradients, as zeropp uses them."""
    parts = []
    for bits, data, left, right in ((8, "weights", 62, 462), (4, "gradients", 542, 942)):
        rows = [row for row in result["one_hop"] if row["bits"] == bits]
        parts += _panel(rows, bits, data, (left, right))
    for number, (_, _, name, colour) in enumerate(SERIES):
        x, y = 62 + 300 * (number % 3), HEIGHT - 32 + 20 * (number // 3)
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(x + 30, y, name, "start", colour))
    title = "Error of quantization against bytes per element, for five codes and seven block sizes"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    style = 'font-family="sans-serif" font-size="13" fill="none" role="img">'
    return "\n".join([f"{head} {style}", f"<title>{title}</title>", *parts, "</svg>"]) + "\n"


def _panel(rows: Sequence[dict], bits: int, data: str, sides: tuple[int, int]) -> Iterator[str]:
    curves = {
        (code, scale): [row for row in rows if (row["code"], row["scale"]) == (code, scale)]
        for code, scale, _, _ in SERIES
    }
    shown = [row for curve in curves.values() for row in curve]
    errors = [row["errors"][data]["error"] for row in shown]
    extra = [row["bytes"] - bits / 8 for row in shown]
    panel = Panel(
        bits=bits, data=data, left=sides[0], right=sides[1],
        bytes=(min(extra) / 1.15, max(extra) * 1.15),
        errors=(min(errors) / 1.04, max(errors) * 1.04),
    )  # fmt: skip
    yield _text(sum(sides) / 2, 20, f"INT{bits}, on {data}", "middle", weight=600)
    yield from _axes(panel, shown)
    for code, scale, _, colour in reversed(SERIES):
        curve = sorted(curves[code, scale], key=lambda row: row["bytes"])
        yield from _curve(panel, curve, colour)


def _axes(panel: Panel, rows: Sequence[dict]) -> Iterator[str]:
    low, high = panel.errors
    for error in _round_numbers(low, high):
        _, y = panel.place(panel.bits / 8 + panel.bytes[0], error)
        yield f'<path d="M{panel.left} {y:.1f}H{panel.right}" stroke="{GRAY}" opacity=".3"/>'
        yield _text(panel.left - 6, y + 4, f"{100 * error:g}%", "end")
    base = HEIGHT - BOTTOM
    yield f'<path d="M{panel.left} {base}H{panel.right}" stroke="{GRAY}"/>'
    for row in (row for row in rows if (row["code"], row["scale"]) == ("signed", "bf16")):
        x, _ = panel.place(row["bytes"], low)
        yield f'<path d="M{x:.1f} {base}v5" stroke="{GRAY}"/>'
        yield _text(x, base + 19, f"{row['bytes']:.3f}", "middle", size=11)
    middle = (panel.left + panel.right) / 2
    yield _text(middle, base + 36, "bytes per element, scales included", "middle", size=12)


def _curve(panel: Panel, rows: Sequence[dict], colour: str) -> Iterator[str]:
    places = [panel.place(row["bytes"], row["errors"][panel.data]["error"]) for row in rows]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{points}" stroke="{colour}" stroke-width="2"/>'
    for row, (x, y) in zip(rows, places, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>'
        if is_zeropp(row):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" stroke="{colour}" stroke-width="2"/>'
            yield _text(x - 9, y + 21, f"blocks of {row['block']}", "end", colour, weight=600)


def _round_numbers(low: float, high: float) -> Iterator[float]:
    """Four to eight numbers of one or two digits between the two."""
    unit = 10.0 ** math.floor(math.log10(high - low))
    unit *= next(part for part in (0.1, 0.2, 0.25, 0.5, 1) if (high - low) / (part * unit) <= 8)
    for count in range(math.ceil(low / unit), math.floor(high / unit) + 1):
        yield round(count * unit, 12)


def _share(value: float, ends: tuple[float, float]) -> float:
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def _text(
    x: float, y: float, text: str, anchor: str, colour: str = GRAY, *, size: int = 13,
    weight: int = 400,
) -> str:  # fmt: skip
    font = f' font-size="{size}"' if size != 13 else ""
    font += f' font-weight="{weight}"' if weight != 400 else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{font}>{text}</text>'
    )
