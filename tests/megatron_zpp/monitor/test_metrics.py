"""What iterations add up to, and who gets to know it."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.monitor.log_lines import MegatronLines
from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.monitor.metrics import History, Iteration, Metrics, Validation
from megatron_zpp.monitor.report.run_record import RunFacts
from megatron_zpp.settings.config import LogConfig, ModelConfig, RecomputeConfig
from megatron_zpp.train.loop import LossWatch
from tests.megatron_zpp.monitor.steps import FLOPS, ITERATION, MEMORY


@dataclass
class Page:
    """A screen and a writer that remember."""

    rank: int = 0
    lines: list[str] = field(default_factory=list)
    drawn: list[Iteration] = field(default_factory=list)
    written: list[object] = field(default_factory=list)
    described: list[RunFacts] = field(default_factory=list)
    state: str = "open"

    def describe(self, facts: RunFacts) -> None:
        self.described.append(facts)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, iteration: Iteration) -> None:
        self.drawn.append(iteration)

    def held_out(self, loss: float) -> None:
        self.lines.append(f"held out {loss}")

    def iteration(self, iteration: Iteration) -> None:
        self.written.append(iteration)

    interval = validation = iteration

    def flush(self) -> None:
        self.state = "flushed"

    def close(self) -> None:
        self.state = "closed"


def metrics(page: Page, *, is_first: bool = True, **config: object) -> Metrics:
    settings = LogConfig(**{"log_interval": 1} | config)
    writers = [page] if is_first else []
    return Metrics(settings, page, MegatronLines(), world_size=8, flops=FLOPS, writers=writers)


def test_an_interval_averages_and_counts_and_starts_anew():
    page = Page()
    collected = metrics(page, log_interval=2)
    assert collected.iteration(replace(ITERATION, iteration=1, loss=4.0, seconds=0.1)) is None
    assert page.lines == []
    interval = collected.iteration(
        replace(ITERATION, iteration=2, loss=2.0, seconds=0.3, skipped=True, global_batch_size=128)
    )
    assert "lm loss: 3.000000E+00 |" in page.lines[0]  # the skipped iteration's loss counts
    assert "(ms): 200.0 |" in page.lines[0]
    assert "skipped iterations:   1 | number of nan iterations:   0 |" in page.lines[0]
    assert interval.samples_per_second == pytest.approx((256 + 128) / 0.4)
    collected.iteration(replace(ITERATION, iteration=3, loss=1.0))
    collected.iteration(replace(ITERATION, iteration=4, loss=1.0))
    assert "lm loss: 1.000000E+00 |" in page.lines[1]
    assert "skipped iterations:   0 |" in page.lines[1]


@pytest.mark.parametrize("skipped", [False, True])
def test_a_loss_that_is_not_finite_is_shown_and_counted(skipped):
    page = Page()
    collected = metrics(page, log_interval=2)
    collected.iteration(replace(ITERATION, iteration=1, loss=math.nan, skipped=skipped))
    collected.iteration(replace(ITERATION, iteration=2, loss=2.0))
    assert "lm loss: NAN |" in page.lines[0]
    assert "nan iterations:   1 |" in page.lines[0]


def test_empty_micro_batches_are_a_share_of_those_of_the_interval_or_not_shown():
    page = Page()
    collected = metrics(page, log_interval=2)
    first = replace(ITERATION, iteration=1, global_batch_size=8, empty_share=0.25)
    collected.iteration(first)
    interval = collected.iteration(replace(ITERATION, iteration=2, global_batch_size=24))
    assert interval.empty_share == 2 / 32
    assert "nan iterations:   0 | empty micro-batches: 6.25% | samples" in page.lines[0]
    collected.iteration(replace(ITERATION, iteration=3))
    collected.iteration(replace(ITERATION, iteration=4))
    assert "empty" not in page.lines[1]


def test_writers_hear_every_tensorboard_interval_and_are_closed():
    page = Page()
    collected = metrics(page, log_interval=4, tensorboard_log_interval=2)
    steps = [replace(ITERATION, iteration=number) for number in range(1, 5)]
    results = [collected.iteration(step) for step in steps]
    assert page.drawn == steps
    assert page.written == [steps[1], steps[3], results[3]]
    collected.flush()
    assert page.state == "flushed"
    collected.close()
    assert page.state == "closed"


def test_writers_that_come_later_hear_what_the_run_is():
    """As those of a node that goes on with the curves of one that ended."""
    page = Page()
    collected = metrics(page, is_first=False)
    facts = RunFacts(version="7")
    collected.use_facts(lambda: facts)
    collected.iteration(ITERATION)
    collected.writers = [page]
    collected.iteration(ITERATION)
    collected.iteration(ITERATION)
    assert page.described == [facts]


def test_history_remembers_where_the_losses_began_across_a_resume():
    collected = metrics(Page(), log_interval=100)
    at = {"consumed_samples": 1, "consumed_tokens": 1, "moment": ""}
    for number, loss in enumerate([9.0] + [3.0] * 20, start=1):
        collected.iteration(replace(ITERATION, iteration=number, loss=loss))
        collected.validation(Validation(iteration=number, loss=loss + 1, **at))
    collected.validation(Validation(iteration=21, loss=77.0, split="test", **at))
    history = collected.history
    assert (history.first_loss, history.last_loss) == (9.0, 3.0)
    assert (history.first_held_out, history.last_held_out) == (10.0, 4.0)
    assert history.tokens_per_second == pytest.approx(256 * 2048 / 0.5)
    resumed = History()
    resumed.load_state_dict(history.state_dict())
    assert resumed == replace(history, tokens=0, seconds=0.0)
    assert resumed.tokens_per_second == 0.0


def test_memory_is_reported_once_on_a_gpu_and_never_on_the_cpu():
    page = Page()
    collected = metrics(page)
    for number in (1, 2):
        collected.iteration(replace(ITERATION, iteration=number, memory=MEMORY))
    assert sum("memory (MB)" in line for line in page.lines) == 1
    page = Page()
    metrics(page).iteration(replace(ITERATION, memory=replace(MEMORY, allocated_count=None)))
    assert len(page.lines) == 1


def test_memory_of_a_process_grows_with_what_it_holds():
    before = read_memory(torch.device("cpu"))
    held = torch.ones(2**25)  # 128 MiB
    after = read_memory(torch.device("cpu"))
    assert held[-1] == 1  # has memory: no other test left a mode in which tensors have none
    assert held.numel() * 4 * 0.9 < after.allocated_bytes - before.allocated_bytes
    assert after.peak_allocated_bytes >= after.allocated_bytes


SHAPE = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024}


def test_operations_are_equation_3_of_the_megatron_paper():
    layers, hidden, seq, vocab = 12, 768, 1024, 50304
    full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
    per_sample = 96 * seq * layers * hidden**2 * (
        1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    )  # fmt: skip
    ours = flops_per_token(ModelConfig(**SHAPE), full, 50257)
    assert ours * seq == pytest.approx(per_sample, rel=1e-12)


def test_operations_follow_the_shape_and_what_is_recomputed():
    none = RecomputeConfig()
    plain = flops_per_token(ModelConfig(**SHAPE), none, 50257)
    core = 4 * 1024 * 768 * 12
    selective = RecomputeConfig(recompute_granularity="selective")
    assert flops_per_token(ModelConfig(**SHAPE), selective, 50257) == plain + core
    grouped = flops_per_token(ModelConfig(**SHAPE, num_query_groups=3), none, 50257)
    assert plain - grouped == 3 * 12 * 2 * 768 * 2 * (768 - 3 * 64)
    gated = flops_per_token(ModelConfig(**SHAPE, swiglu=True, ffn_hidden_size=3072), none, 50257)
    assert gated - plain == 3 * 12 * 2 * 768 * 3072
    windows = ModelConfig(**SHAPE, window_size="255,0", window_attn_skip_freq="3")
    seen = flops_per_token(windows, none, 50257)
    assert plain - seen == 3 * 4 * 768 * 8 * (1024 - 256)  # in 8 of 12 layers
    last = RecomputeConfig(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=1
    )
    layer = 2 * (4 * 768**2 + 2 * 768 * 3072) + 4 * 768 * 256
    assert flops_per_token(windows, last, 50257) - seen == layer


def test_a_spike_is_far_above_what_the_losses_vary():
    watch, generator = LossWatch(), torch.Generator().manual_seed(1)
    noise = 0.05 * torch.randn(300, generator=generator)
    falling = [5 - 0.01 * step + float(noise[step]) for step in range(300)]
    assert [watch.mean_below(loss) for loss in falling] == [None] * 300
    mean = watch.mean_below(4.5)
    assert mean == pytest.approx(sum(falling[-100:]) / 100)
    early = LossWatch()
    assert [early.mean_below(loss) for loss in [2.0] * 19 + [9.0]] == [None] * 20
