"""Writes the report of a run, `report.html`, from what the run recorded."""

import json
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import jinja2

from megatron_zpp.monitor.report.cards import byte_unit, cards
from megatron_zpp.monitor.report.run_record import (
    ACROSS_NODES,
    JSON_LINES,
    PLAIN,
    REPORT,
    SENT,
    RunRecord,
    read_record,
    warmed_up_median,
)
from megatron_zpp.settings.config import LogConfig
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

TEMPLATE = Path(__file__).with_name("page.html")

log = logging.getLogger("megatron_zpp")


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Draw what a run has recorded in its TensorBoard folder; return the file, `output` if given.

    Raises InputError if nothing was recorded, and if matplotlib is not installed.
    """
    record = read_record(folder)
    if find_spec("matplotlib") is None:
        raise InputError(
            "the report needs matplotlib: pip install matplotlib, and then "
            f"megatron-zpp report {folder}"
        )
    output = output or folder / REPORT
    write_atomically(output, page(record))
    return output


def report_rows(config: LogConfig) -> list[tuple[str, str]]:
    """Write the report at the end of a run; return a row with its path, or why there is none.

    One rank calls it, after the writers are closed. Nothing that goes wrong with it ends the run.
    """
    if config.tensorboard_dir is None:
        return []
    try:
        return [("report", str(write_report(Path(config.tensorboard_dir))))]
    except (InputError, OSError) as error:
        return [("report", f"none: {error}")]
    except Exception:
        log.warning("the report could not be made", exc_info=True)
        return []


def report_after_failure(config: LogConfig) -> list[tuple[str, str]]:
    """Write the report of a run that a signal or an error ended, if it recorded anything new."""
    if config.tensorboard_dir is None:
        return []
    folder = Path(config.tensorboard_dir)
    recorded, report = folder / JSON_LINES, folder / REPORT
    if not recorded.exists() or not recorded.stat().st_size:
        return []
    if report.exists() and report.stat().st_mtime >= recorded.stat().st_mtime:
        return []
    return report_rows(config)


def page(record: RunRecord) -> str:
    """The report as HTML, which refers to nothing outside it."""
    facts, strict = record.facts, jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=strict)
    settings = {name: part for name, part in facts.settings.items() if name != "zero"}
    return environment.from_string(TEMPLATE.read_text()).render(
        title=_title(record.folder),
        state=_state(record),
        summary=_summary(record),
        cards=list(cards(record)),
        expectations=_expectations(record),
        facts=facts,
        command=shlex.join(facts.command),
        json=json.dumps(facts.settings["zero"], indent=2) if "zero" in facts.settings else "",
        settings=[(name, value) for part in settings.values() for name, value in part.items()],
        footer=(
            f"Megatron-Z++ {facts.version}, {time.strftime('%Y-%m-%d %H:%M')}. Each point is the "
            f"mean of a log interval. Made by: megatron-zpp report {record.folder}"
        ),
    )


def _title(folder: Path) -> str:
    """The run's folder; `tensorboard` in it says nothing."""
    folder = folder.resolve()
    return (folder.parent if folder.name in ("tensorboard", "tb", "curves") else folder).name


def _state(record: RunRecord) -> str:
    done, planned = record.iterations, record.facts.train_iters
    if 0 < planned <= done:
        return f"finished, {_iterations(planned)}"
    return f"{done:,} of {_iterations(planned)}" if planned else _iterations(done)


def _iterations(count: int) -> str:
    return f"{count:,} iteration{'s' * (count != 1)}"


def _summary(record: RunRecord) -> str:
    """The sentence below the title."""
    model = (value for name, value in record.facts.table if name == "model")
    parts = [part for value in model for part in value.splitlines()]
    if record.intervals:
        seconds = sum(
            length * interval["seconds_per_iteration"]
            for length, interval in zip(record.lengths, record.intervals, strict=True)
        )
        tokens = record.intervals[-1]["consumed_tokens"]
        parts.append(f"{tokens:,} tokens in {duration(seconds)} of steps")
    for split in ("validation", "test"):
        points = record.held_out_points(split)
        if len(points) > 1:
            parts.append(f"{split} loss {points[0][1]:.3f} → {points[-1][1]:.3f}")
    return " · ".join(parts)


def _expectations(record: RunRecord) -> dict[str, Sequence] | None:
    """What was expected of a step beside what was measured, as columns and rows of a table."""
    facts, rows = record.facts, []
    plan = facts.expected_step
    if plan is not None and record.intervals:
        median = warmed_up_median([each["seconds_per_iteration"] for each in record.intervals])
        expected = f"{plan['fastest']:.3g} to {plan['slowest']:.3g} s"
        rows.append(("step time", "", expected, f"{median:.3g} s"))
    if record.purposes:
        rows += _byte_rows(record)
    columns = (f"plain ZeRO-{facts.zero_stage}", "expected", "measured")
    return {"columns": columns, "rows": rows} if rows else None


def _byte_rows(record: RunRecord) -> list[tuple[str, str, str, str]]:
    """Bytes per node and step: by formula without ZeRO++, expected at the start, and sent."""
    sent = record.mean_bytes(SENT)
    columns: list[Mapping[str, float]] = [record.mean_bytes(PLAIN), record.forecast_bytes(), sent]
    unit, size = byte_unit(max(sum(column.values()) for column in columns))
    where = "across nodes" if record.hop == ACROSS_NODES else "in the node"
    table = {purpose.replace("_", " "): [each[purpose] for each in columns] for purpose in sent}
    table[f"{unit} {where}, per step"] = [sum(column.values()) for column in columns]
    return [(name, *(f"{value / size:.2f}" for value in values)) for name, values in table.items()]


def duration(seconds: float) -> str:
    """Seconds as "45 s", "2 min 20 s", "3 h 5 min" or "2 d 3 h"."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = max(1, round(seconds))
    first = next(place for place, (_, size) in enumerate(units) if whole >= size)
    (name, size), *smaller = units[first : first + 2]
    text = f"{whole // size} {name}"
    if smaller and whole % size // smaller[0][1]:
        text += f" {whole % size // smaller[0][1]} {smaller[0][0]}"
    return text
