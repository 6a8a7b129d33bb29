"""The benchmark on an emulated cluster: what it refuses, measures, prints, and leaves behind."""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import cluster
from benchmarks.cluster.cluster_chart import draw
from benchmarks.cluster.cluster_report import show, summary
from benchmarks.cluster.configurations import axes_of, zero_config
from benchmarks.cluster.interleaved_steps import TimedStep, TimedSteps, run_interleaved, warm_up
from benchmarks.cluster.network.emulation import Counters
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.zero_json import OURS
from megatron_zpp.capabilities.experts.messages import copies_across_nodes
from tests.benchmarks.cluster.namespaces import namespaces_of, needs_namespaces, wait_until
from tests.benchmarks.started import run_benchmark
from tests.launched import ROOT

TINY = "--layers 2 --hidden 32 --heads 2 --seq 16 --vocab 256"
# Messages of 100 KB and more, so that headers and gloo's own messages weigh little.
SMALL = "--layers 1 --hidden 512 --heads 2 --seq 16 --vocab 256"


ADAPTED = (
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 256 --swiglu --disable-bias-linear "
    "--position-embedding-type rope --pretrained-checkpoint none --lora-rank 2 "
    "--lora-target-modules qkv attention.output experts.gate experts.input experts.output"
)


def measured(arguments: str, *more: str) -> dict:
    words = *arguments.split(), *more, "--json", "-"
    return json.loads(run_benchmark("cluster.cluster", *words).stdout)


def checked_options(monkeypatch: pytest.MonkeyPatch, arguments: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["cluster.py", *arguments.split()])
    options = cluster.BENCHMARK.parse()
    cluster.BENCHMARK.checked(options)
    return options


def test_a_repeated_rate_counts_once_and_a_repeated_name_is_another_configuration(monkeypatch):
    monkeypatch.setattr(cluster.emulation, "require_namespaces", lambda: None)
    chosen = checked_options(
        monkeypatch, "qgz zero3 qgz --rate none --rate 1gbit --rate none --products fp32"
    )
    assert chosen.configurations == ("qgz", "zero3", "qgz 2") and chosen.rate == ["none", "1gbit"]
    default = checked_options(monkeypatch, "--one-host --products fp32")
    assert default.configurations == ("fsdp2", "zero3", "zeropp") and default.rate == [None]
    assert default.layers == 8 and default.hidden == 512


def test_each_configuration_switches_on_what_its_name_says():
    keys = "zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_gradients"
    configs = {name: zero_config(name, 3) for name in OURS}
    for name, config in configs.items():
        has_all = name.startswith(("zeropp", "code-steps"))
        expected = (
            has_all or name in ("qwz", "no-hpz"),
            3 if has_all or name == "hpz" else 1,
            has_all or name in ("qgz", "no-hpz"),
        )
        assert tuple(getattr(config.zero_optimization, key) for key in keys) == expected, name
        assert config.zeropp.weight_steps == name.startswith("code-steps")
        assert config.reduces_once == (name.endswith("once") or name == "zero1")
        assert config.stage == (1 if name == "zero1" else 3) and config.zeropp.ranks_per_node == 3
    bits = {name: configs[name].zeropp.gradient_bits for name in OURS}
    assert bits["zeropp"] == (8, 4) and bits["zeropp-4-4"] == (4, 4)
    assert bits["code-steps-int3"] == (8, 3)
    messages = [configs[name].zeropp.code_messages for name in OURS if "code" in name]
    assert messages == [True, True, False, None] and not configs["zeropp"].zeropp.code_messages
    assert axes_of("zeropp-4-4") == ({}, "zeropp-4-4")
    assert axes_of("pp2-tp4-zero3-once") == ({"pp": 2, "tp": 4}, "zero3-once")


class FakeRanks:
    """Two ranks whose steps take no time; `losses` are those of each configuration."""

    def __init__(self, **losses: float) -> None:
        self.losses, self.orders = losses, []

    def ask(self, order: str, name: str, part: str) -> list[dict]:
        self.orders.append(name)
        seconds_of_ranks = (0.1 * len(self.orders), 0.2)
        loss = self.losses[name]
        return [
            {"seconds": seconds, "processor_seconds": 0.5, "loss": loss, "sent": None}
            for seconds in seconds_of_ranks
        ]


def run_fake(ranks: FakeRanks, rounds: int) -> dict[str, TimedSteps]:
    firsts = warm_up(ranks, ("fsdp2", "qwz"), [], steps=1, say=lambda text: None)
    return run_interleaved(ranks, firsts, [], rounds=rounds, say=lambda text: None)


def test_steps_are_taken_in_turn_and_the_slowest_rank_counts():
    ranks = FakeRanks(fsdp2=6.0, qwz=6.03)
    timed = run_fake(ranks, rounds=2)
    assert ranks.orders == ["fsdp2", "qwz", "fsdp2", "qwz", "qwz", "fsdp2"]
    assert timed["fsdp2"].seconds == pytest.approx([0.3, 0.6])
    assert timed["qwz"].seconds == pytest.approx([0.4, 0.5])
    assert [step.processor_seconds for step in timed["qwz"].steps] == [1.0, 1.0]


def test_what_trains_another_model_is_not_timed():
    ranks = FakeRanks(fsdp2=6.0, qwz=6.1)
    with pytest.raises(Disagreement, match="losses are 6.1000 and 6.0000; nothing was timed"):
        run_fake(ranks, rounds=1)
    assert ranks.orders == ["fsdp2", "qwz"]


def timed_steps(
    seconds: list[float], final_loss: float, sent: list[dict | None], wire: list[dict]
) -> TimedSteps:
    losses = [5.0, 4.5, 4.0, 3.5, final_loss]
    steps = [
        TimedStep(seconds=each, processor_seconds=0.7, loss=loss, sent=sent, wire=wire)
        for each, loss in zip(seconds, losses, strict=True)
    ]
    first = TimedStep(seconds=9.0, processor_seconds=0.7, loss=5.0, sent=sent, wire=wire)
    return TimedSteps(first=first, steps=steps)


def example_result(link: dict | None) -> dict:
    """A result of 2 nodes x 2 ranks and a model of 1000 parameters, M = 2000 bytes."""
    wire = [{"eth0": Counters(1030, 1020), "lo": Counters(510, 510)},
            {"eth0": Counters(1020, 1030), "lo": Counters(505, 505)}]  # fmt: skip
    wire = wire if link else []
    ledger = [{("gradients", "across_nodes"): 500, ("gradients", "in_node"): 250}] * 4
    timed = {
        "fsdp2": timed_steps([2.0, 4.0, 3.0, 9.0, 1.0], 3.0, [None] * 4, wire),
        "zeropp": timed_steps([1.5] * 5, 3.1, ledger, wire),
    }
    built = {"fsdp2": [{"expected": None}] * 4, "zeropp": [{"expected": ledger[0]}] * 4}
    rows = summary(timed, built, ranks_per_node=2)
    rate = "100mbit" if link else None
    return {
        "date": "today", "commit": "abc", "uncommitted": [], "parameters": 1000, "nodes": 2,
        "ranks_per_node": 2, "shape": {"layers": 1}, "rounds": 5, "products": "bf16",
        "warm_up": 1, "round_trip": 20,
        "machine": {"processor": "some", "cores": 2, "memory_gib": 1.0, "gpus": []},
        "versions": {"torch": "2"}, "load": {"before": 0.0, "after": 0.0},
        "runs": [{"rate": rate, "link": link, "dropped": 0, "rows": rows}],
    }  # fmt: skip


LINK = {"limit": 100.0, "measured": [99.0, 70.0]}


def test_bytes_are_those_of_nodes_and_stand_beside_the_ledgers():
    plain, ours = example_result(LINK)["runs"][0]["rows"]
    assert plain["median"] == 3 and plain["quartiles"] == [1.5, 6.5]
    assert ours["speedup"] == ours["paired"] == 2 and plain["interval"] == [1, 1]
    assert ours["final_loss"] == 3.1 and ours["processor_seconds"] == 0.7
    assert plain["nodes"][0]["sent"] == 1030 and plain["nodes"][1]["received"] == 1030
    assert plain["nodes"][0]["ledger"] is None and plain["nodes"][0]["difference"] is None
    assert ours["nodes"][0]["difference"] == pytest.approx(0.03)
    assert ours["nodes"][1]["difference"] == pytest.approx(0.02)
    assert ours["nodes"][1]["in_node_difference"] == pytest.approx(0.01)
    assert ours["expected"] == [{"gradients/across_nodes": 1000, "gradients/in_node": 500}] * 2
    assert json.loads(json.dumps(ours)) == ours


@pytest.mark.parametrize("link", [LINK, None])
def test_the_tables_and_the_chart_show_bytes_in_models(link, tmp_path: Path):
    printed = show(example_result(link))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    _, ours = [row for row in cells if row[:1] == ["zeropp"]]  # times, and bytes
    _, plain = [row for row in cells if row[:1] == ["fsdp2"]]
    assert "1 steps before the timed ones, 20 ms from node to node and back" in printed
    assert printed.count("2.00") == 2 and "without gradients" not in printed
    if link is None:
        assert "one host, no network" in printed
        assert ours[1:] == ["-", "-", "-", "0.500", "0.0", "-", "0.250"]
    else:
        assert "99 and 70 Mbit/s" in printed and "too slow or too fast: 70 of 100" in printed
        assert ours[1:] == ["0.515", "0.0", "0.515", "0.500", "0.0", "+3.00%", "0.250"]
        assert plain[1:] == ["0.515", "0.0", "0.515", "-", "-", "-", "-"]
    pytest.importorskip("matplotlib")
    draw(example_result(link), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_one_host_shows_what_the_ledgers_say():
    names = "zero3 zeropp pp2-zero1 cp2-zeropp attach"
    result = measured(f"--one-host {names} --nodes 2 --ranks-per-node 2 --rounds 2 {TINY}")
    assert result["nodes"] == result["ranks_per_node"] == 2
    (run,) = result["runs"]
    assert run["rate"] is None and run["link"] is None
    plain, ours, pipeline, _, attached = run["rows"]
    for row in run["rows"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        for node, expected in zip(row["nodes"], row["expected"], strict=True):
            assert node["sent"] is None and node["difference"] is None
            assert node["ledger"] == expected and sum(expected.values()) > 0
        assert row["final_loss"] < row["first_loss"]
    assert ours["nodes"][0]["ledger"]["weights_backward/across_nodes"] == 0
    assert plain["nodes"][0]["ledger"]["weights_backward/across_nodes"] > 0
    assert pipeline["nodes"][0]["ledger"]["weights_forward/across_nodes"] == 0
    assert pipeline["nodes"][0]["ledger"]["pipeline/across_nodes"] > 0
    for node, sharded in zip(attached["nodes"], ours["nodes"], strict=True):
        assert node["ledger"].items() <= sharded["ledger"].items()


@needs_namespaces
def test_the_interfaces_count_what_the_ledgers_say():
    flags = "--rounds 2 --rate 400mbit --micro-batches 2"
    result = measured(f"fsdp2 fsdp2-ring zero3 zeropp {flags} {SMALL}")
    (run,) = result["runs"]
    assert run["link"]["limit"] == 400 and run["dropped"] == 0
    assert max(run["link"]["measured"]) < 1.05 * 400
    whole = 2 * result["parameters"]
    plain, ring, unquantized, ours = run["rows"]
    # Of each block 3/4 are gathered twice, and gloo's reduction sends as much again, for each of
    # two micro-batches.
    assert plain["nodes"][0]["sent"] == pytest.approx(2 * 3 * whole, rel=0.1)
    assert ring["nodes"][0]["sent"] == pytest.approx(2 * 2.25 * whole, rel=0.1)
    for row in (unquantized, ours):
        for node in row["nodes"]:
            assert 0 < node["difference"] < 0.02, row["name"]
            assert node["sent"] == pytest.approx(node["received"], rel=0.02)
    # Weights in INT8 once per step, gradients in INT4 for each micro-batch, and their scales.
    assert ours["nodes"][0]["sent"] == pytest.approx((0.25 + 2 * 0.125) * whole, rel=0.1)


@needs_namespaces
def test_the_interfaces_count_tokens_that_cross_to_experts():
    """Four moves of 512 tokens of a node, with ids and weights, about once each."""
    flags = (
        "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 32 --disable-bias-linear "
        "--moe-router-force-load-balancing"
    )
    shape = "--layers 1 --hidden 512 --heads 2 --seq 256 --vocab 256"
    result = measured(f"ep4-zeropp --rounds 1 {shape}", "--flags", flags)
    ((row,),) = (run["rows"] for run in result["runs"])
    crossing = 512 * copies_across_nodes(8, 3, 2) * (4 * 2 * 512 + 3 * (4 + 1 + 4))
    for node in row["nodes"]:
        assert 0 < node["difference"] < 0.02
        assert node["ledger"]["expert/across_nodes"] == pytest.approx(crossing, rel=0.1)


@needs_namespaces
def test_frozen_weights_cross_once_with_hpz():
    """Those of experts, which the ranks of a node split, too; then only adapters cross."""
    shape = "--layers 2 --hidden 256 --heads 4 --seq 16 --vocab 256"
    names = "lora-zero3 mixz mixz-hpz"
    result = measured(f"{names} {shape} --rounds 2 --passes 3", "--flags", ADAPTED)
    exact, stored, hpz = result["runs"][0]["rows"]
    frozen = 2 * 2 * (4 + 3 * 16) * 256**2  # bf16 bytes of two blocks' matrices
    # Each node sends half of what there is to each gather, forward and backward: M in bf16.
    assert exact["later_step"] > frozen and stored["later_step"] < 0.6 * exact["later_step"]
    assert hpz["later_step"] < hpz["first_step"] - 0.2 * frozen
    assert hpz["later_step"] < 0.02 * 2 * result["parameters"]
    assert hpz["later_pass"] < 0.01 * stored["later_pass"]
    assert stored["held_bytes"] < 0.52 * exact["held_bytes"]


@needs_namespaces
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(ending: signal.Signals):
    command = [sys.executable, "-m", "benchmarks.cluster.cluster"]
    run = subprocess.Popen(
        [*command, *f"zero3 {TINY} --rounds 1000 --products fp32".split()],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ranks() -> list[str]:
        listed = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for name in namespaces_of(run.pid)
        ]
        return " ".join(listed).split()

    try:
        wait_until(lambda: len(ranks()) == 4, "ranks in their nodes", seconds=120)
        started = ranks()
        run.send_signal(ending)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 128 + ending
    assert f"stopped by {ending.name}" in errors and "Traceback" not in errors
    assert not namespaces_of(run.pid)
    assert not any(Path(f"/proc/{process}").exists() for process in started)
