"""The charts of a report: what is drawn of a run, with its title, its number and its legend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.monitor.report.drawing import (
    WIDE,
    Band,
    Curve,
    draw_bars,
    draw_curves,
    draw_stack,
)
from megatron_zpp.monitor.report.run_record import (
    ACROSS_NODES,
    PLAIN,
    SENT,
    Point,
    RunRecord,
    warmed_up_median,
)

PURPOSE_COLOURS = ("blue", "teal", "orange", "violet", "green", "gray")
BYTE_UNITS = MappingProxyType({"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1})


@dataclass(frozen=True, kw_only=True)
class Card:
    """A chart as the page shows it: `number` with its `unit` is what to read first.

    `legend` has a label, a colour and whether it is dashed for each kind of line. `wide` is the
    same drawing for large screens, if there is one.
    """

    title: str
    number: str
    unit: str
    svg: str
    legend: Sequence[tuple[str, str, bool]] = ()
    wide: str | None = None


def cards(record: RunRecord) -> Iterator[Card]:
    """All charts for which the run has numbers."""
    yield from loss(record)
    if record.purposes:
        yield from compared_bytes(record)
    if record.intervals:
        yield from speed(record)
        yield step_time(record)
        if record.purposes:
            yield bytes_over_iterations(record)
        yield from optimization(record)
        yield from memory(record)


def loss(record: RunRecord) -> Iterator[Card]:
    """Training and held-out loss, on the whole width."""
    curves = [
        Curve(label="training", colour="blue", points=record.points("lm_loss")),
        Curve(label="held-out", colour="orange", points=record.held_out_points(), dots=True),
    ]
    curves = [curve for curve in curves if curve.points]
    if curves:
        shown = curves[-1]
        yield Card(
            title="Loss",
            number=f"{shown.points[-1][1]:.3f}",
            unit=f"nats per token, {shown.label}; over iterations",
            svg=draw_curves(curves, from_zero=False),
            wide=draw_curves(curves, from_zero=False, width=WIDE),
            legend=_legend(curves),
        )


def compared_bytes(record: RunRecord) -> Iterator[Card]:
    """What a node sent in a step, what was expected, and what plain ZeRO would have sent."""
    sent, plain = record.mean_bytes(SENT), record.mean_bytes(PLAIN)
    forecast = record.forecast_bytes()
    total, plain_total = sum(sent.values()), sum(plain.values())
    if not total or not plain_total:
        return
    stage = record.facts.zero_stage
    rows = {f"plain ZeRO-{stage}, by formula": plain, "expected at the start": forecast}
    rows["sent by this run"] = sent
    rows = {name: parts for name, parts in rows.items() if any(parts.values())}
    purposes = [each for each in record.purposes if any(parts[each] for parts in rows.values())]
    colours = dict(zip(record.purposes, PURPOSE_COLOURS, strict=False))
    unit, size = byte_unit(max(total, plain_total))
    scaled = [
        (name, {purpose: parts[purpose] / size for purpose in purposes})
        for name, parts in rows.items()
    ]
    where = "between nodes" if record.hop == ACROSS_NODES else "in the node"
    yield Card(
        title=f"Bytes {where}",
        number=f"{max(plain_total / total, total / plain_total):.1f}×",
        unit=f"{'less' if plain_total >= total else 'more'} than plain ZeRO-{stage}",
        svg=draw_bars(scaled, colours, unit),
        legend=[(purpose.replace("_", " "), colours[purpose], False) for purpose in purposes],
    )


def speed(record: RunRecord) -> Iterator[Card]:
    """Tokens per second of all ranks."""
    rates = record.tokens_per_second
    points = list(zip((each["iteration"] for each in record.intervals), rates, strict=True))
    number, unit = f"{warmed_up_median(rates):,.0f}", "of all ranks, median"
    yield _one_curve("Tokens per second", number, unit, points, "blue")


def step_time(record: RunRecord) -> Card:
    """Seconds of a step, beside the range that a plan expected."""
    points = record.points("seconds_per_iteration")
    median = warmed_up_median([seconds for _, seconds in points])
    plan = record.facts.expected_step
    size, unit = (1.0, "s") if max(plan["slowest"] if plan else 0, median) >= 1 else (1e-3, "ms")
    curve = Curve(label="measured", colour="blue", points=_scaled(points, size))
    band, legend = None, []
    if plan is not None:
        low, high = plan["fastest"] / size, plan["slowest"] / size
        band = Band(label="expected by the plan", colour="orange", low=low, high=high)
        legend = [*_legend([curve]), (band.label, band.colour, False)]
    return Card(
        title="Step time",
        number=f"{median / size:,.3g}",
        unit=f"{unit}, median",
        svg=draw_curves([curve], band=band),
        legend=legend,
    )


def bytes_over_iterations(record: RunRecord) -> Card:
    """What a node sent in a step, by purpose, and what was expected."""
    colours = dict(zip(record.purposes, PURPOSE_COLOURS, strict=False))
    curves = {each: record.sent_points(each) for each in record.purposes}
    totals = [sum(y for _, y in points) for points in zip(*curves.values(), strict=True)]
    unit, size = byte_unit(max(totals))
    layers = [
        Curve(label=each.replace("_", " "), colour=colours[each], points=_scaled(points, size))
        for each, points in curves.items()
        if any(y for _, y in points)
    ]
    expected = sum(record.forecast_bytes().values()) / size
    ends = [(x, expected) for x in (layers[0].points[0][0], layers[0].points[-1][0])]
    line = Curve(label="expected", colour="muted", points=ends, dashed=True) if expected else None
    mean = sum(record.mean_bytes(SENT).values()) / size
    return Card(
        title="Bytes of a step",
        number=f"{mean:.3g}",
        unit=f"{unit} per node, mean",
        svg=draw_stack(layers, line),
        legend=_legend([*layers, *([line] if line else [])]),
    )


def optimization(record: RunRecord) -> Iterator[Card]:
    """Learning rate and the norm of the gradients."""
    rates, norms = record.points("learning_rate"), record.points("grad_norm")
    if rates:
        yield _one_curve(
            "Learning rate", f"{max(y for _, y in rates):.3g}", "at most", rates, "green"
        )
    if norms:
        median = warmed_up_median([y for _, y in norms])
        yield _one_curve(
            "Gradient norm", f"{median:.3g}", "before clipping, median", norms, "green"
        )


def memory(record: RunRecord) -> Iterator[Card]:
    """Memory of the first rank."""
    held, peaks = record.points("memory_bytes"), record.points("peak_memory_bytes")
    if not held:
        return
    unit, size = byte_unit(max(y for _, y in peaks))
    curves = [
        Curve(label="at most so far", colour="gray", points=_scaled(peaks, size), dashed=True),
        Curve(label="held", colour="violet", points=_scaled(held, size)),
    ]
    yield Card(
        title="Memory",
        number=f"{max(y for _, y in peaks) / size:.3g}",
        unit=f"{unit} on the first rank, at most",
        svg=draw_curves(curves),
        legend=_legend(curves),
    )


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """The largest unit of which there is at least one, and its size."""
    return next((unit for unit in BYTE_UNITS.items() if num_bytes >= unit[1]), ("bytes", 1))


def _one_curve(title: str, number: str, unit: str, points: Sequence[Point], colour: str) -> Card:
    svg = draw_curves([Curve(label=title, colour=colour, points=points)])
    return Card(title=title, number=number, unit=unit, svg=svg)


def _scaled(points: Sequence[Point], size: float) -> list[Point]:
    return [(x, y / size) for x, y in points]


def _legend(curves: Sequence[Curve]) -> list[tuple[str, str, bool]]:
    return [(curve.label, curve.colour, curve.dashed) for curve in curves]
