"""The README's table and picture, made from the results of two benchmarks.
CLUSTER.json is a result of `benchmarks.cluster.cluster` with the configurations of `NAMES`, and
CONVERGENCE.json one of `benchmarks.convergence.convergence` with `code-steps`. Table and picture
replace what stands between two comments in README.md. The picture is written beside CLUSTER.json,
where the page with all figures is expected too, under the same name.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from benchmarks.cluster.cluster_chart import draw
from benchmarks.cluster.cluster_report import largest, rate_title
from benchmarks.shared.charts import require_matplotlib
from benchmarks.shared.result import ROOT
from benchmarks.shared.table import Column, Row, table
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

NAMES: Mapping[str, str] = {  # configuration -> what the README calls it
    "fsdp2": "FSDP2, gloo",
    "fsdp2-ring": "FSDP2, ring",
    "zeropp": "ZeRO++ as published",
    "code-steps": "Megatron-Z++",
}
OURS = "code-steps"
JSONS: Mapping[str, str] = {  # configuration -> the file that sets the same
    "zeropp": "examples/ds_zeropp_two_nodes.json",
    "code-steps": "examples/ds_code_steps_two_nodes.json",
}
PICTURE_RATES = ("100mbit", "1gbit")
BEGIN, END = "<!-- headline: begin -->\n", "<!-- headline: end -->\n"


def main() -> None:
    """Write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cluster", type=Path)
    parser.add_argument("convergence", type=Path)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    picture = options.cluster.with_suffix(".png")
    try:
        require_matplotlib(picture)
        made = headline(options.cluster, options.convergence)
        text = with_headline(options.readme.read_text(), made)
        draw(pictured(json.loads(options.cluster.read_text())), picture)
    except InputError as error:
        sys.exit(f"error: {error}")
    write_atomically(options.readme, lambda file: file.write(text.encode()))


def headline(cluster_path: Path, convergence_path: Path) -> str:
    """The picture, the table, and what was trained, as Markdown."""
    paths = cluster_path, convergence_path
    cluster, convergence = (json.loads(path.read_text()) for path in paths)
    rows = [_bytes_row(cluster), *map(_times_row, cluster["runs"])]
    columns = [Column(title, name) for name, title in NAMES.items()]
    parts = [
        f"![Bytes between two nodes and step times]({_link(cluster_path, '.png')})",
        table(rows, Column("", "title"), *columns, Column("FSDP2 takes (ring / gloo)", "ratios")),
    ]
    for said, path in ((_setting(cluster), cluster_path), (_loss(convergence), convergence_path)):
        said += f" [All figures]({_link(path, '.md')})."
        parts.append(textwrap.fill(said, 110, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(parts) + "\n"


def pictured(cluster: dict) -> dict:
    """The part of a result that the picture shows."""
    runs = [run for run in cluster["runs"] if run["rate"] in PICTURE_RATES]
    named = [
        {**run, "rows": [{**row, "name": NAMES[row["name"]]} for row in _rows(run).values()]}
        for run in runs
    ]
    return {**cluster, "runs": named}


def with_headline(readme: str, text: str) -> str:
    """The README with the text between its two comments; raises InputError without them."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise InputError(f"the README has no lines {BEGIN.strip()} and {END.strip()}")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}{END}{after}"


def _rows(run: dict) -> dict[str, Row]:
    """The rows of `NAMES`, in that order; raises InputError if one was not measured."""
    rows = {row["name"]: row for row in run["rows"]}
    missing = [name for name in NAMES if name not in rows]
    if missing:
        raise InputError(f"the result has no {', '.join(missing)}; measure {' '.join(NAMES)}")
    return {name: rows[name] for name in NAMES}


def _row(title: str, cells: Mapping[str, str], values: Mapping[str, float]) -> Row:
    """A row of cells, and how many times ours the values of FSDP2 are."""
    ring, gloo = (values[name] / values[OURS] for name in ("fsdp2-ring", "fsdp2"))
    return {"title": title, **cells, "ratios": f"**{ring:.1f} ×** / {gloo:.1f} ×"}


def _bytes_row(cluster: dict) -> Row:
    rows, model_bytes = _rows(cluster["runs"][0]), 2 * cluster["parameters"]
    sent = {name: largest(node["sent"] for node in row["nodes"]) for name, row in rows.items()}
    cells = {
        name: f"{value / 1e6:.1f} MB ({value / model_bytes:.2f} M)" for name, value in sent.items()
    }
    return _row("a node sends per step", cells, sent)


def _times_row(run: dict) -> Row:
    medians = {name: row["median"] for name, row in _rows(run).items()}
    cells = {
        name: "{:.2f} s ({:.2f} to {:.2f})".format(medians[name], *row["quartiles"])
        for name, row in _rows(run).items()
    }
    return _row(f"step, {rate_title(run['rate'])}", cells, medians)


def _setting(cluster: dict) -> str:
    millions = cluster["parameters"] / 1e6
    return (
        f"Measured on {cluster['nodes']} emulated nodes of {cluster['ranks_per_node']} ranks; a "
        f"GPT of {millions:.1f} M parameters in bf16 (M = {2 * millions:.1f} MB) after "
        f"{cluster['warm_up']} steps, {cluster['shape']['seq']} tokens per rank. Step times are "
        "medians, with quartiles. FSDP2 was measured twice in the same run: with reductions on a "
        "ring, as NCCL's (2.25 M and headers), and with gloo's own (3 M). Megatron-Z++ is "
        f"`{JSONS[OURS]}`, with which `make pretrain` runs. ZeRO++ as published is "
        f"`{JSONS['zeropp']}` with uncoded messages: INT8 weights once per step, INT4 gradients. "
        "Megatron-Z++ coded its messages at every rate; with "
        '`"code_messages": "auto"`, the default where the JSON does not say, they are coded only '
        "where that saves time."
    )


def _loss(convergence: dict) -> str:
    row = next(row for row in convergence["rows"] if row["variant"] == OURS)
    return (
        f"Held-out loss after {convergence['recipe']['steps']} steps of the model of "
        f"`make pretrain`, over {row['seeds']} seeds: **{row['difference']:+.2%} ± "
        f"{row['error']:.2%}** (standard error) against the same runs without quantization."
    )


def _link(path: Path, suffix: str) -> str:
    return path.with_suffix(suffix).resolve().relative_to(ROOT).as_posix()


if __name__ == "__main__":
    main()
