"""Draws the learning-rate schedules as an SVG: `python tools/plot_schedules.py docs/schedules.svg`.

The curves are computed by `megatron_zpp/settings/scheduled_values.py`, which training uses as well.
"""

import sys
from collections.abc import Callable

try:
    from megatron_zpp.settings.scheduled_values import LearningRate
    from zeropp.atomic import write_atomically
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

WIDTH, HEIGHT = 760, 280  # pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 210, 16, 36  # margins; the legend is on the right
GRAY = "#808080"  # like the colours below, readable on white and on black
SAMPLES, WARMUP, WSD_DECAY = 1000, 100, 200  # of the run, its warm-up and the decay of WSD
MIN_LR = 0.1  # as a fraction of the largest rate
STEP = 5  # samples between two points

CURVES = (
    ("constant", "exponential", "#9a7fd1"),
    ("WSD", "minus_sqrt", "#e8710a"),
    ("linear", "exponential", "#2f9e6e"),
    ("cosine", "exponential", "#4c8bf5"),
    ("inverse-square-root", "exponential", "#d2527f"),
)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/plot_schedules.py OUT.svg")
    write_atomically(sys.argv[1], lambda file: file.write(draw().encode()))


def draw() -> str:
    """An SVG of every --lr-decay-style over one run, as fractions of the largest rate."""
    parts = []
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _place(0, level)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRAY}" opacity=".3"/>')
        parts.append(_text(x - 8, y + 4, f"{level:g}", "end"))
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _place(fraction * SAMPLES, 0)
        parts.append(_text(x, y + 20, f"{fraction:.0%}", "middle"))
    for number, (style, wsd_style, colour) in enumerate(CURVES):
        parts.append(_line(_schedule(style, wsd_style), colour))
        name = f"{style}, {wsd_style}" if style == "WSD" else style
        parts.append(_text(WIDTH - RIGHT + 14, TOP + 5 + 20 * number, name, "start", colour))
    below = TOP + 5 + 20 * len(CURVES)
    parts.append(_text(WIDTH - RIGHT + 14, below + 8, "share of --lr over the run;", "start"))
    parts.append(_text(WIDTH - RIGHT + 14, below + 26, "warm-up 10%, --min-lr 10%", "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    style = 'font-family="sans-serif" font-size="13" fill="none">'
    return "\n".join([f"{head} {style}", *parts, "</svg>"]) + "\n"


def _schedule(style: str, wsd_style: str) -> LearningRate:
    return LearningRate(
        max_lr=1.0,
        min_lr=MIN_LR,
        init_lr=0.0,
        style=style,
        warmup=float(WARMUP),
        decay=float(SAMPLES),
        wsd_style=wsd_style,
        wsd_decay=float(WSD_DECAY),
    )


def _place(samples: float, rate: float) -> tuple[float, float]:
    x = LEFT + samples / SAMPLES * (WIDTH - LEFT - RIGHT)
    return x, TOP + (1 - rate) * (HEIGHT - TOP - BOTTOM)


def _line(rate: Callable[[float], float], colour: str) -> str:
    points = (_place(samples, rate(samples)) for samples in range(0, SAMPLES + 1, STEP))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" stroke="{colour}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = GRAY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    main()
