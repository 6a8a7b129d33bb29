"""The report of a run: its numbers, its charts, and that it needs nothing but itself."""

import html
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_zpp.commands.__main__ import main
from megatron_zpp.monitor.report import report
from megatron_zpp.monitor.report.drawing import HEIGHT
from megatron_zpp.monitor.report.report import (
    duration,
    report_after_failure,
    report_rows,
    write_report,
)
from megatron_zpp.settings.config import LogConfig
from tests.megatron_zpp.monitor.report.recorded import LENGTH, MIB, interval, record, usual
from zeropp.errors import InputError

CHARTS = {  # and what stands above each
    "Loss": "5.250nats per token, held-out; over iterations",
    "Bytes between nodes": "8.0×less than plain ZeRO-3",
    "Tokens per second": "4,000of all ranks, median",
    "Step time": "500ms, median",
    "Bytes of a step": "1.5MiB per node, mean",
    "Learning rate": "0.004at most",
    "Gradient norm": "0.667before clipping, median",
    "Memory": "400MiB on the first rank, at most",
}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
VOID = {"meta", "br"}


@dataclass
class Page(HTMLParser):
    """A page's text by section, its attributes and identifiers; asserts that its tags match."""

    sections: dict[str, str] = field(default_factory=dict)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    style: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._section = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs).get("aria-label", "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["style"]:
            self.style += data
            return
        self.text.append(data)
        in_chart = {"svg", "ul", "h2"} & set(self._open)
        if "section" in self._open and self._section and not in_chart:
            self.sections[self._section] = self.sections.get(self._section, "") + data.strip()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the usual run."""
    return write_report(usual(tmp_path_factory.mktemp("usual")))


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    page.close()
    return page


def drawn(path: Path, chart: str, colour: str) -> list[tuple[float, float]]:
    """The points of the first line of a colour in a chart of the page."""
    section = path.read_text().partition(f'aria-label="{chart}"')[2].partition("</section>")[0]
    line = rf'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--{colour}\)'
    pairs = re.findall(r"[ML] (\S+) (\S+)", re.search(line, section)[1])
    return [(float(x), float(y)) for x, y in pairs]


def test_each_number_has_its_chart(written: Path) -> None:
    page = read(written)
    assert page.sections == CHARTS
    text = " ".join(" ".join(page.text).split())
    assert "finished, 40 iterations" in text
    assert "5,774,336 parameters · 2 layers, hidden 256 · 80,000 tokens in 20 s of steps" in text
    assert "of steps · validation loss 9.500 → 5.250" in text
    assert "step time 0.4 to 0.6 s 0.5 s" in text
    for row in ("weights forward 4.00 1.25 1.00", "weights backward 4.00 0.00 0.00"):
        assert row in text
    assert "gradients 4.00 1.00 0.50 MiB across nodes, per step 12.00 2.25 1.50" in text
    assert "pretrain_gpt.py --sample-prompt 'a word'" in text and '"stage": 3' in text
    assert "model 5,774,336 parameters 2 layers, hidden 256" in text and "num_layers 2" in text
    assert "def <script>alert(1)</script>(self):" in text  # as text


def test_lines_are_drawn_to_scale(written: Path) -> None:
    for chart, colour, values in (
        ("Loss", "blue", [8.0, 7.0, 6.0, 5.0]),
        ("Loss", "orange", [9.5, 5.25]),
        ("Gradient norm", "green", [2.0, 1.0, 2 / 3, 0.5]),
    ):
        points = drawn(written, chart, colour)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        scale = (ys[-1] - ys[0]) / (values[-1] - values[0])
        assert scale < 0  # pixels count downwards
        placed = [ys[0] + scale * (value - values[0]) for value in values]
        assert ys == pytest.approx(placed, abs=1e-4)  # matplotlib rounds to six digits
        assert [x - xs[0] for x in xs] == pytest.approx(
            [place * (xs[-1] - xs[0]) / (len(xs) - 1) for place in range(len(xs))], abs=1e-4
        )


def test_nothing_outside_the_file_is_needed(written: Path) -> None:
    page = read(written)
    tags = {tag for tag, _, _ in page.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "image"}
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "data", "action", "background") and name[:2] != "on"
        assert name not in ("href", "xlink:href") or value[0] == "#", (tag, value)
        assert all(link[0] == "#" for link in re.findall(r"url\(([^)]*)", value)), value
        assert "://" not in value
    assert not re.search(r"@import|url\(|://", page.style)
    names = [value for _, name, value in page.attributes if name == "id"]
    used = {value[1:] for _, name, value in page.attributes if name == "href"}
    assert used <= set(names) and len(names) == len(set(names))
    variables = set(re.findall(r"var\(--([a-z]+)\)", written.read_text()))
    assert variables - {"swatch"} <= set(re.findall(r"--([a-z]+):", page.style))
    assert written.stat().st_size < 100_000


def test_a_long_run_is_drawn_small_and_its_spikes_stay(tmp_path: Path) -> None:
    lines = [interval(n, lm_loss=4.0, grad_norm=1.0 + 99 * (n == 12345)) for n in range(1, 20001)]
    path = write_report(record(tmp_path, lines, train_iters=10**6))
    assert path.stat().st_size < 300_000
    assert "200,000 of 1,000,000 iterations" in path.read_text()
    section = path.read_text().partition('aria-label="Gradient norm"')[2].partition("<use ")[2]
    band = re.search(r'<path id="[^"]*" d="([^"]*z)', section)[1]  # lies above the place of its use
    heights = [HEIGHT + float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", band)]
    line = [y for _, y in drawn(path, "Gradient norm", "green")]
    assert min(line) - min(heights) > 50  # pixels that the spike is above the mean of its 50


@pytest.mark.parametrize(
    ("lines", "charts"),
    [
        ([{"iteration": 0, "validation_loss": 9.5}], {"Loss"}),
        (
            [{k: v for k, v in interval(1).items() if "comm" not in k and "memory" not in k}],
            set(CHARTS) - {"Bytes between nodes", "Bytes of a step", "Memory"},
        ),
        ([interval(n, lm_loss=float("nan")) for n in (1, 2)], set(CHARTS) - {"Loss"}),
        ([interval(1, grad_norm=None)], set(CHARTS) - {"Gradient norm"}),
    ],
    ids=["only evaluated", "one rank", "not finite", "no norm"],
)
def test_what_was_not_measured_is_left_out(tmp_path: Path, lines: list, charts: set) -> None:
    assert set(read(write_report(record(tmp_path, lines))).sections) == charts


def test_one_node_is_compared_within_itself(tmp_path: Path) -> None:
    line = {name.replace("across_nodes", "in_node"): v for name, v in interval(1).items()}
    page = read(write_report(record(tmp_path, [line | {"comm/across_nodes": 0.0}])))
    assert page.sections["Bytes in the node"] == "8.0×less than plain ZeRO-3"
    assert page.sections["Bytes of a step"] == "1.5MiB per node, mean"


def test_a_node_that_went_on_alone_sent_nothing_to_others(tmp_path: Path) -> None:
    """Its lines have no bytes of an exchange."""
    sent = {"comm/outer_across_nodes": 3 * MIB, "comm/plain_outer_across_nodes": 0.0}
    lines = [interval(1) | sent, interval(2), interval(3)]
    page = read(write_report(record(tmp_path, lines)))
    assert page.sections["Bytes of a step"] == "2.5MiB per node, mean"


def test_a_run_that_was_killed_early_has_a_report(tmp_path: Path) -> None:
    record(tmp_path, map(interval, (1, 2)))
    (tmp_path / "run.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "lm')
    assert "20 iterations" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("text", [None, "", '{"iterat'])
def test_a_folder_without_a_run_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(InputError, match=f"{tmp_path} has no metrics.jsonl with log lines"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(InputError, match="expected a JSON object in each line"):
        write_report(tmp_path)


def test_no_run_ends_for_its_report(tmp_path: Path, monkeypatch, caplog) -> None:
    config = LogConfig(tensorboard_dir=str(usual(tmp_path)))
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    ((name, why),) = report_rows(config)
    assert name == "report" and why == (
        "none: the report needs matplotlib: pip install matplotlib, and then megatron-zpp report "
        f"{tmp_path}"
    )
    monkeypatch.undo()
    monkeypatch.setattr(report, "page", lambda record: 1 / 0)
    with caplog.at_level(logging.WARNING, "megatron_zpp"):
        assert report_rows(config) == []
    assert "ZeroDivisionError" in caplog.text
    assert report_rows(LogConfig()) == []
    monkeypatch.undo()
    assert report_rows(config) == [("report", f"{tmp_path}/report.html")]


def test_after_a_failure_only_what_is_new_is_drawn(tmp_path: Path) -> None:
    config = LogConfig(tensorboard_dir=str(tmp_path / "curves"))
    assert report_after_failure(LogConfig()) == []
    assert report_after_failure(config) == []  # it failed before it recorded anything
    usual(tmp_path / "curves")
    assert report_after_failure(config) == [("report", f"{tmp_path}/curves/report.html")]
    assert report_after_failure(config) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (59, "59 s"), (60, "1 min"), (152, "2 min 32 s"), (11100, "3 h 5 min"),
     (180000, "2 d 2 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def measured(path: Path, folder: Path, widths: tuple[int, ...]) -> Iterator[dict]:
    """How Chromium lays out the page at each width: charts, and how wide the content is."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(path.read_text())}" style="width: {width}px; height: 900px; '
        'border: 0"></iframe>'
        for width in widths
    )
    script = """
    onload = () => {
      const seen = [...document.querySelectorAll("iframe")].map(frame => {
        const page = frame.contentDocument;
        const charts = [...page.querySelectorAll(".chart")].map(chart => {
          const svg = [...chart.querySelectorAll("svg")].filter(each => each.checkVisibility());
          const box = svg[0].getBoundingClientRect();
          const texts = [...svg[0].querySelectorAll("text")].map(t => t.getBoundingClientRect());
          const line = svg[0].querySelector("path[style*=stroke]");
          return {title: chart.getAttribute("aria-label"), count: svg.length,
                  left: box.left, right: box.right, height: box.height,
                  text: Math.min(...texts.map(t => t.height)),
                  inside: texts.every(t => t.left >= box.left - 4 && t.right <= box.right + 8)};
        });
        return {charts, content: page.documentElement.scrollWidth};
      });
      document.title = JSON.stringify(seen);
    };"""
    (folder / "frames.html").write_text(f"<title></title><script>{script}</script>{frames}")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
        f"--user-data-dir={folder}/profile", "--timeout=20000",
        (folder / "frames.html").as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_charts_on_a_screen_and_on_a_phone(written, tmp_path):
    widths = (1280, 390)
    for width, page in zip(widths, measured(written, tmp_path, widths), strict=True):
        assert page["content"] <= width  # nothing to scroll sideways
        assert [chart["title"] for chart in page["charts"]] == list(CHARTS)
        for chart in page["charts"]:
            assert chart["count"] == 1 and chart["inside"], chart
            assert 0 <= chart["left"] < chart["right"] <= width
            assert chart["height"] > 150 and chart["text"] >= 10, chart


def test_intervals_count_by_their_iterations(tmp_path: Path) -> None:
    """A shorter interval, as before a resume with another --log-interval, weighs less."""
    short = interval(1) | {"iteration": 2 * LENGTH + 1, "consumed_tokens": 40_400}
    short |= {"comm/gradients_across_nodes": 22.5 * 2**20, "seconds_per_iteration": 0.1}
    path = write_report(record(tmp_path, [interval(1), interval(2), short]))
    # (20 x 1.5 + 1 x 23.5) / 21 MiB; 20 s and 0.1 s
    assert read(path).sections["Bytes of a step"] == "2.55MiB per node, mean"
    assert "40,400 tokens in 10 s of steps" in path.read_text()


def test_the_folder_above_the_curves_will_do(tmp_path: Path, capsys) -> None:
    usual(tmp_path / "run" / "tensorboard")
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "tensorboard" / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert "<title>run</title>" in page.read_text()
    words = ["report", "--input", str(page.parent), "--output", str(tmp_path / "other.html")]
    assert main(words) == 0
    assert (tmp_path / "other.html").read_text().count("<svg") == page.read_text().count("<svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}"], "{} has several runs: name one of {}/a, {}/b"),
        (["{}/a", "--output", "{}"], "--output {}: is a folder; name a file"),
        (["{}/empty"], "{}/empty has no metrics.jsonl with log lines"),
    ],
)
def test_what_is_no_run_is_said(tmp_path: Path, words: list, message: str, capsys) -> None:
    for name in "ab":
        usual(tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert main(["report", *(word.format(tmp_path) for word in words)]) == 1
    assert message.replace("{}", str(tmp_path)) in capsys.readouterr().err
