"""What a person sees: on a pseudo-terminal short lines and a bar, through a pipe Megatron's."""

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.log_lines import MegatronLines, ShortLines
from megatron_zpp.monitor.metrics import History, Metrics, Validation
from megatron_zpp.settings.config import LogConfig
from tests.megatron_zpp.monitor import steps
from tests.terminal import ESCAPE, Terminal

ITERATION = replace(
    steps.ITERATION, iteration=1, train_iters=40, consumed_samples=16, consumed_tokens=2048,
    learning_rate=1e-3, global_batch_size=16, seq_length=128, loss=9.0,
    memory=replace(steps.MEMORY, allocated_count=None),
)  # fmt: skip


@contextmanager
def environment(
    monkeypatch: pytest.MonkeyPatch, term: str = "xterm", columns: int = 120
) -> Iterator[None]:
    for name in ("LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(columns))  # rich looks at the process's own terminal
    yield


def train(console: Console) -> list[str]:
    """Ten iterations with a held-out loss after the fifth; returns the log lines."""
    settings = LogConfig(log_interval=5)
    lines = ShortLines if console.is_terminal else MegatronLines
    metrics = Metrics(settings, console, lines(), world_size=1, flops=steps.FLOPS)
    sent: list[str] = []
    print_line = console.line
    console.line = lambda text: (sent.append(text), print_line(text))
    with console, console.live():
        for number in range(1, 11):
            metrics.iteration(replace(ITERATION, iteration=number, loss=9.0 - number / 4))
            if number == 5:
                at = {"iteration": 5, "consumed_samples": 1, "consumed_tokens": 1}
                metrics.validation(Validation(**at, loss=8.25, moment="iteration 5"))
    return sent


def test_a_pipe_carries_plain_lines_only():
    stream = io.StringIO()
    sent = train(Console(stream=stream))
    assert stream.getvalue() == "".join(f"{line}\n" for line in sent)
    assert len(sent) == 5  # two intervals, and a held-out loss between rules
    assert sent[0].startswith(" iteration        5/      40 |")
    assert "\x1b" not in stream.getvalue()
    of_another_rank = io.StringIO()
    train(Console(1, of_another_rank, interactive=True))
    assert of_another_rank.getvalue() == ""


def test_a_terminal_shows_progress_under_short_lines(monkeypatch):
    monkeypatch.setattr("megatron_zpp.monitor.console.REFRESH_SECONDS", 0.0)
    with environment(monkeypatch):
        terminal = Terminal(columns=120)
        sent = train(Console(stream=terminal.stream))
    shown = terminal.close()
    assert sent[0] == "step  5/40  loss 8.250  lr 1.0e-3  4.10k tok/s  eta 0:18"
    assert sent[1] == "step 5  held-out loss 8.250  perplexity 3,828"
    for line in sent:
        assert line.rstrip() in shown, "a log line was wrapped or coloured"
    plain = ESCAPE.sub("", shown)
    assert re.search(r"━ 10/40 \d:\d\d:\d\d left, loss 6\.5000", plain)  # 9 - 10/4
    assert "held-out 8.2500" in plain
    assert "4,096 tokens/s" in plain  # 16 * 128 in half a second
    assert "\x1b[?25h" in shown  # the cursor is back


@pytest.mark.parametrize("columns", [20, 60])
def test_a_narrow_terminal_neither_wraps_lines_nor_breaks_the_display(monkeypatch, columns):
    monkeypatch.setattr("megatron_zpp.monitor.console.REFRESH_SECONDS", 0.0)
    with environment(monkeypatch, columns=columns):
        terminal = Terminal(columns)
        sent = train(Console(stream=terminal.stream))
    shown = terminal.close()
    assert all(line.rstrip() in shown for line in sent)
    bars = [text for text in re.split(r"[\r\n]+", ESCAPE.sub("", shown)) if "…" in text]
    assert bars
    assert max(map(len, bars)) <= columns


def test_a_dumb_terminal_and_a_refusal_get_plain_lines(monkeypatch):
    for term, interactive in (("dumb", None), ("xterm", False)):
        with environment(monkeypatch, term):
            terminal = Terminal(columns=120)
            sent = train(Console(stream=terminal.stream, interactive=interactive))
        assert terminal.close() == "".join(f"{line}\r\n" for line in sent)


def test_the_display_is_gone_and_the_cursor_back_after_an_error(monkeypatch):
    with environment(monkeypatch):
        terminal = Terminal(columns=120)
        console = Console(stream=terminal.stream)
        with pytest.raises(RuntimeError), console.live():
            console.progress(ITERATION)
            raise RuntimeError
        console.line("after")
    shown = terminal.close()
    assert shown.index("\x1b[?25h") < shown.index("after\r\n")


def test_the_bar_is_drawn_at_most_ten_times_a_second(monkeypatch):
    with environment(monkeypatch):
        terminal = Terminal(columns=120)
        console = Console(stream=terminal.stream)
        with console.live():
            for number in range(1, 40):
                console.progress(replace(ITERATION, iteration=number))
    shown = ESCAPE.sub("", terminal.close())
    assert " 1/40" in shown and "20/40" not in shown


def test_notices_go_to_rank_0_and_warnings_come_from_everybody():
    streams = io.StringIO(), io.StringIO()
    for rank, stream in enumerate(streams):
        with Console(rank, stream):
            for name in ("zeropp", "megatron_zpp.data"):
                log = logging.getLogger(name)
                log.debug("unseen")
                log.info("%s chose %d", name, 4)
                log.warning("slow")
                log.error("bad")
    plain = "".join(
        f"{name} chose 4\nwarning: slow\nerror: bad\n" for name in ("zeropp", "megatron_zpp.data")
    )
    assert streams[0].getvalue() == plain
    assert streams[1].getvalue() == "[rank 1] warning: slow\n[rank 1] error: bad\n" * 2


def test_a_level_hides_what_is_below_it():
    stream = io.StringIO()
    log = logging.getLogger("megatron_zpp")
    with Console(stream=stream) as console:
        console.set_level(logging.WARNING)
        log.info("hidden")
        log.warning("shown")
        console.line("a line of the log")
    assert stream.getvalue() == "warning: shown\na line of the log\n"


def test_loggers_are_as_before_after_the_context():
    log = logging.getLogger("zeropp")
    before = (log.level, log.propagate, list(log.handlers))
    with pytest.raises(RuntimeError), Console(stream=io.StringIO()):
        raise RuntimeError
    assert (log.level, log.propagate, list(log.handlers)) == before


def test_the_summary_is_two_columns():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.table(
        "Megatron-Z++",
        [("model", "GPT"), ("collectives", "all-gather, bf16\nreduce-scatter, bf16"), ("x", "")],
    )
    assert stream.getvalue().splitlines() == [
        "Megatron-Z++",
        "  model        GPT",
        "  collectives  all-gather, bf16",
        "               reduce-scatter, bf16",
        "  x",
    ]


@pytest.mark.parametrize(
    ("history", "rows", "sample", "lines"),
    [
        (
            {"first_loss": 9.0, "last_loss": 4.5, "first_held_out": 9.1, "last_held_out": 5.0,
             "tokens": 5000, "seconds": 2},
            [("checkpoint", "out/iter_10")], "def f():\n    return 1",
            ["Finished", "  training loss      9.000 -> 4.500  (-4.500)",
             "  held-out loss      9.100 -> 5.000  (-4.100)", "  tokens per second  2,500",
             "  checkpoint         out/iter_10", "Sample", "  def f():", "      return 1"],
        ),
        ({"first_held_out": 5.0, "last_held_out": 5.0}, [], None,
         ["Finished", "  held-out loss      5.000", "  tokens per second  none trained"]),
        ({}, [], None, ["Finished", "  tokens per second  none trained"]),
    ],
)  # fmt: skip
def test_the_ending_tells_how_far_the_losses_fell(history, rows, sample, lines):
    stream = io.StringIO()
    Console(stream=stream).ending(History(**history), rows, sample=sample)
    assert stream.getvalue().splitlines() == lines


def test_text_that_the_stream_cannot_encode_does_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream=stream).line("naïve ▁")
    assert raw.getvalue() == b"na?ve ?\n"
