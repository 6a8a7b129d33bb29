"""The lines of the log, letter by letter: Megatron's, and the short ones of a terminal."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from megatron_zpp.capabilities.experts.log import BUSIEST_EXPERT, BUSIEST_RANK
from megatron_zpp.monitor.communication import Communication
from megatron_zpp.monitor.log_lines import MegatronLines, ShortLines, duration
from megatron_zpp.monitor.matmul_rate import MatmulRate
from megatron_zpp.monitor.metrics import Interval, Iteration, Validation, summarize
from tests.megatron_zpp.monitor.steps import FLOPS, ITERATION, MEMORY

HELD_OUT = Validation(
    iteration=100, consumed_samples=1, consumed_tokens=1, loss=2.0, moment="iteration 100"
)


def interval_of(*iterations: Iteration, peak: float | None = 2e15) -> Interval:
    rate = MatmulRate(measured=1.2e15, peak=peak)
    return summarize(iterations, world_size=8, flops=FLOPS, rate=rate)


def test_megatrons_line_letter_by_letter():
    measured = replace(
        ITERATION, loss_scale=65536.0, grad_norm=1.23456, num_zeros=7.0, params_norm=123.4
    )
    # 256 samples and 524288 tokens in .5 s on 8 ranks: 131072 tokens/s/rank, times 6e9 operations
    assert MegatronLines().interval(interval_of(measured)) == [
        " iteration       10/  500000 | consumed samples:         2560 |"
        " consumed tokens:      5242880 | elapsed time per iteration (ms): 500.0 |"
        " learning rate: 1.500E-04 | global batch size:   256 | lm loss: 1.050000E+01 |"
        " loss scale: 65536.0 | grad norm: 1.235 | num zeros: 7.0 | params norm: 123.400 |"
        " actual seqlen:  2048 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 | samples per second: 512.000 |"
        " tokens per gpu per second (tgs): 131072.000 | TFLOPs: 786.43 |"
    ]


def test_what_was_not_measured_is_not_in_the_line():
    (line,) = MegatronLines().interval(interval_of(ITERATION))
    names = [part.split(":")[0].strip() for part in line.split("|")]
    assert names[6:8] == ["lm loss", "actual seqlen"]
    assert not {"loss scale", "grad norm", "num zeros", "params norm"} & set(names)


def test_log_throughput_adds_megatron_lms_field_and_its_shares_of_both_rates():
    (line,) = MegatronLines(throughput=True).interval(interval_of(ITERATION))
    # 131072 tokens/s/rank of 4.5e9 operations each, of 1.2e15 measured and 2e15 by the data sheet
    assert (
        "(ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 589.8 |"
        " share of measured matmul rate: 49.2% | MFU: 29.5% | l"
    ) in line
    assert line.endswith("TFLOPs: 786.43 |")
    (line,) = MegatronLines(throughput=True).interval(interval_of(ITERATION, peak=None))
    assert "share of measured matmul rate: 49.2% | learning rate" in line


def test_megatrons_held_out_loss_is_between_rules():
    text = (
        " validation loss at iteration 100 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 | "
    )
    assert MegatronLines().validation(HELD_OUT) == ["-" * 95, text, "-" * 95]
    assert len(text) == 36 + 30 + 28
    huge = replace(HELD_OUT, loss=50.0)
    assert huge.perplexity == pytest.approx(math.exp(20))
    assert math.isnan(replace(huge, loss=math.nan).perplexity)


def test_memory_in_both_formats():
    assert MegatronLines().memory(0, MEMORY, 1) == (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 |"
        " reserved: 3.0 | max reserved: 4.0"
    )
    assert ShortLines().memory(0, MEMORY, 1) == (
        "memory of rank 0 after 1 steps: at most 2.00 MiB in use, 4.00 MiB reserved"
    )


def test_the_short_line_letter_by_letter():
    step = replace(ITERATION, train_iters=200, learning_rate=1.4e-3, loss=6.9314)
    sent = Communication(steps=4, sent=Counter({("gradients", "across_nodes"): 30198989}))
    lines = [
        ShortLines().interval(interval_of(each))
        for each in (
            replace(step, iteration=5, learning_rate=0.0, loss=10.8234),
            replace(step, iteration=90, communication=sent, seconds=1.2),
            replace(step, iteration=200),
        )
    ]
    assert [line for (line,) in lines] == [
        "step   5/200  loss 10.82  lr      0  1.05M tok/s  eta 1:38",
        "step  90/200  loss 6.931  lr 1.4e-3   437k tok/s  7.20 MiB/node  eta 2:12",
        "step 200/200  loss 6.931  lr 1.4e-3  1.05M tok/s",
    ]
    few = replace(step, iteration=9, train_iters=20, communication=sent, seconds=1.2)
    (line,) = ShortLines().interval(interval_of(few))
    assert line.endswith("  437k tok/s  7.20 MiB between nodes  eta 0:13") and len(line) == 80


def test_short_lines_show_what_is_unusual_and_stay_short():
    sent = Communication(steps=1, sent=Counter({("gradients", "across_nodes"): 151 * 2**20}))
    late = replace(ITERATION, iteration=9_999_999, train_iters=10_000_000, communication=sent)
    nan = replace(late, loss=math.nan, skipped=True, empty_share=0.125)
    (line,) = ShortLines(throughput=True).interval(interval_of(nan, late))
    assert line == "step  9999999/10000000  loss   nan  1.05M tok/s  1 skipped, 1 nan, 6.2% empty"
    (line,) = ShortLines(throughput=True).interval(interval_of(ITERATION, peak=None))
    assert "  589.8 TFLOP/s  " in line


def test_both_formats_show_the_balance_of_experts():
    step = replace(
        ITERATION,
        train_iters=200,
        others={
            "load_balancing_loss": 1.0625,
            "moe/load_balancing_loss_layer_3": 1.5,
            BUSIEST_EXPERT: 0.1419,
            BUSIEST_RANK: 1.0816,
        },
    )
    (line,) = MegatronLines().interval(interval_of(step))
    assert (
        "| lm loss: 1.050000E+01 | load_balancing_loss: 1.062500E+00 | busiest expert: 14.19% |"
        " busiest rank: 1.082 | actual seqlen:" in line
    ) and "layer" not in line
    sent = Communication(steps=4, sent=Counter({("gradients", "across_nodes"): 30198989}))
    for each in (step, replace(step, communication=sent)):
        (line,) = ShortLines().interval(interval_of(each))
        assert "  busiest 14%, 1.08x  " in line and len(line) <= 80


def test_short_held_out_losses():
    lines = ShortLines()
    assert lines.validation(HELD_OUT) == ["step 100  held-out loss 2.000  perplexity 7.4"]
    test = replace(HELD_OUT, split="test", loss=9.0)
    assert lines.validation(test) == ["step 100  test loss 9.000  perplexity 8,103"]


def test_durations_are_as_long_as_needed():
    shown = [duration(seconds) for seconds in (0.4, 9, 130, 3730, 100 * 3600)]
    assert shown == ["0:00", "0:09", "2:10", "1:02:10", "4d 4h"]
