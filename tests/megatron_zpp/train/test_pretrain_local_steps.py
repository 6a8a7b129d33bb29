"""Runs whose nodes step alone: random models on random sizes of the axes, and stops.

Set RANDOM_LOCAL_STEPS to draw more runs than the suite does.
"""

import os
import random
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.megatron_zpp.train.training_runs import losses, require_equal, run, run_alone, with_json
from zeropp import ZeroConfig

RUNS = int(os.environ.get("RANDOM_LOCAL_STEPS", "3"))
SIZES = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]


class Drawn:
    """The flags of a model, and of two worlds of two ranks."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        tensor, context, pipe = draw.choice(SIZES)
        self.has_replicas = tensor * context * pipe == 1  # in a node
        self.is_whole = tensor * pipe == 1  # on each rank, or sharded over ranks
        self.has_experts = tensor == 1 and draw.random() < 0.3
        words = [
            f"--num-layers {2 * pipe} --hidden-size {8 * draw.randint(3, 6)} --swiglu",
            "--num-attention-heads 4 --position-embedding-type rope --init-method-std 0.1",
            f"--seq-length {8 * draw.randint(1, 3)} --vocab-size {draw.randint(20, 60)}",
            "--hidden-dropout 0 --attention-dropout 0 --train-iters 7",
            f"--micro-batch-size 1 --global-batch-size {4 * draw.randint(1, 2)} --clip-grad 0.5",
            draw.choice(["", "--untie-embeddings-and-output-weights"]),
            draw.choice(["", "--optimizer muon --muon-fp32-matmul-prec highest"]),
        ]
        if self.has_experts:
            words.append("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12")
            # Buffers that training moves: each node its own between outer steps.
            words.append("--moe-router-score-function sigmoid --moe-router-enable-expert-bias")
            words.append("--moe-router-bias-update-rate 0.03")
        self.model = " ".join(words) + " "
        self.axes = (
            f"--tensor-model-parallel-size {tensor} --context-parallel-size {context} "
            f"--pipeline-model-parallel-size {pipe} "
        )
        self.splits_experts = self.has_experts and context > 1
        if self.splits_experts:
            self.axes += "--expert-model-parallel-size 2 "
        # Two ranks that share a model may be two nodes, which step together.
        self.ranks_per_node = 2 if self.has_replicas else draw.choice([1, 2])

    def zero(self) -> dict:
        """ZeRO's stage and where the optimizer is."""
        zero: dict = {"stage": self.draw.randint(int(self.splits_experts), 3)}
        if zero["stage"] and self.draw.random() < 0.3:
            zero["offload_optimizer"] = {"device": "cpu"}
        return zero

    def overlap(self) -> dict:
        """In how many fragments weights are exchanged, and how many steps that takes."""
        delay = self.draw.choice([0, 1])
        return {"sync_fragments": self.draw.randint(1, 5), "sync_delay": delay, "sync_mixing": 0.3}


@pytest.mark.parametrize("seed", range(RUNS))
def test_an_interval_of_one_is_data_parallelism(seed: int, tmp_path: Path) -> None:
    """Nodes that average gradients in each step print the numbers of one data axis."""
    drawn = Drawn(seed)
    blocks = {"ranks_per_node": 2, "muon_blocks": "whole"}
    expected = run(4, drawn.model + drawn.axes + with_json(drawn.zero(), **blocks), tmp_path)
    alone = {"sync_every": {"0": 1, "100": 2}, "sync_bits": 32}
    json_flags = with_json(drawn.zero(), **blocks, **alone)
    require_equal(run_alone(4, 2, drawn.model + drawn.axes + json_flags, tmp_path), expected)


@pytest.mark.parametrize("seed", range(RUNS))
def test_nodes_of_two_ranks_are_like_nodes_of_one(seed: int, tmp_path: Path) -> None:
    """How a node shares out its work changes no number."""
    drawn = Drawn(103 + seed)  # a pipeline, and experts that context ranks split, too
    draw = drawn.draw
    alone = {
        "sync_every": draw.choice([2, 3, {"0": 1, "2": 2, "4": 3}]),
        "sync_bits": 32,
        "outer_lr": draw.choice([0.7, 1.0]),
        "outer_momentum": draw.choice([0.0, 0.5]),
        **(drawn.overlap() if drawn.is_whole else {}),  # ranks cut their own parts
        "sync_on_host": draw.random() < 0.3,
        "muon_blocks": "whole",
    }
    one = with_json({"stage": 0}, ranks_per_node=1, **alone)
    plain = drawn.model + ("--moe-aux-loss-coeff 0 " if drawn.has_experts else "")
    pair = "--micro-batch-size 2 "
    expected = run_alone(2, 1, plain + pair + one, tmp_path)
    two = with_json(drawn.zero(), ranks_per_node=drawn.ranks_per_node, **alone)
    if drawn.has_replicas:  # a sample of each pair for each of them
        pair = ""
    require_equal(run_alone(4, 2, plain + pair + drawn.axes + two, tmp_path), expected)


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_stop_within_an_interval_loses_no_digit(seed: int, tmp_path: Path) -> None:
    """Everything is quantized, and the run stops after some iteration."""
    drawn = Drawn(207 + seed)  # pipelines, and experts over two nodes, are among the first
    draw = drawn.draw
    zeropp = {
        "ranks_per_node": drawn.ranks_per_node,
        "sync_every": draw.choice([2, 3, {"0": 1, "2": 3}]),
        "sync_bits": draw.choice([2, 4, 8]),
        "sync_feedback": draw.choice([None, True]),
        **drawn.overlap(),
    }
    zero = drawn.zero()
    if zero["stage"] == 3:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    flags = drawn.model + drawn.axes + with_json(zero, **zeropp)
    straight = losses(run_alone(4, 2, flags, tmp_path))
    saved, stop = tmp_path / "saved", draw.randint(1, 6)
    first = run_alone(4, 2, f"{flags} --save {saved} --exit-interval {stop}", tmp_path)
    second = run_alone(4, 2, f"{flags} --load {saved}", tmp_path)
    assert losses(first) + losses(second) == straight != []


def test_the_example_of_two_nodes_runs(tmp_path: Path) -> None:
    path = ROOT / "examples/ds_local_steps_two_nodes.json"
    for each in (path, ROOT / "examples/ds_local_steps_elastic.json"):
        assert not ZeroConfig.from_json(each).notices()
    flags = f"--deepspeed_config {path} --micro-batch-size 2 --global-batch-size 8 --train-iters 2"
    assert len(losses(run_alone(4, 2, flags, tmp_path))) == 2


def test_without_moments_nodes_go_on_from_equal_weights(tmp_path: Path) -> None:
    """A restart takes the weights for those that nodes have agreed on."""
    flags = Drawn(300).model + with_json({"stage": 0}, ranks_per_node=1, sync_every=3)
    saved = tmp_path / "saved"
    run_alone(2, 1, f"{flags} --save {saved} --exit-interval 2", tmp_path)
    log = run_alone(2, 1, f"{flags} --load {saved} --no-load-optim", tmp_path)
    assert "the nodes go on with the mean of their weights" in log
    assert len(losses(log)) == 5
