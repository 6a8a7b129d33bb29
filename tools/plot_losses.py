"""Draws the losses of a run as an SVG: `python tools/plot_losses.py RUN/metrics.jsonl OUT.svg`.

A run writes `metrics.jsonl` to its `--tensorboard-dir`.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from zeropp.atomic import write_atomically

WIDTH, HEIGHT = 760, 300  # pixels
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 16, 36  # margins
GRAY, TRAINING, HELD_OUT = "#808080", "#4c8bf5", "#e8710a"  # readable on white and on black

Points = Sequence[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    records = [json.loads(line) for line in options.metrics.read_text().splitlines()]
    training = [(r["iteration"], r["lm_loss"]) for r in records if "lm_loss" in r]
    held_out = [(r["iteration"], r["validation_loss"]) for r in records if "validation_loss" in r]
    drawing = draw(training, held_out)
    write_atomically(options.output, lambda file: file.write(drawing.encode()))


def draw(training: Points, held_out: Points) -> str:
    """An SVG of both curves over iterations, in nats per token."""
    points = [*training, *held_out]
    last = max(x for x, _ in points)
    low, high = math.floor(min(y for _, y in points)), math.ceil(max(y for _, y in points))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + point[0] / last * (WIDTH - LEFT - RIGHT)
        return x, TOP + (high - point[1]) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for level in range(low, high + 1):
        x, y = place((0, level))
        parts.append(f'<path d="M{x} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRAY}" opacity=".3"/>')
        parts.append(_text(x - 8, y + 4, str(level), "end"))
    for quarter in range(5):
        x, y = place((last * quarter / 4, low))
        parts.append(_text(x, y + 20, f"{last * quarter / 4:g}", "middle"))
    parts.append(_line([place(point) for point in training], TRAINING))
    parts.append(_line([place(point) for point in held_out], HELD_OUT))
    for point in held_out:
        x, y = place(point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{HELD_OUT}"/>')
    parts.append(_text(WIDTH - RIGHT, TOP + 14, "training loss", "end", TRAINING))
    parts.append(_text(WIDTH - RIGHT, TOP + 32, "held-out loss", "end", HELD_OUT))
    parts.append(_text(WIDTH - RIGHT, TOP + 50, "nats per token, by iteration", "end"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    style = 'font-family="sans-serif" font-size="13" fill="none">'
    return "\n".join([f"{head} {style}", *parts, "</svg>"]) + "\n"


def _line(points: Points, colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" stroke="{colour}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = GRAY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    main()
