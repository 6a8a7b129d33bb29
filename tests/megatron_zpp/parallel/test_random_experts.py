"""Random mixtures of experts on random sizes of the axes print the numbers of one rank.

Some route all tokens to few experts: a bias that moves by 100 in a step makes all others idle. They
stop on the way, and go on where other ranks have the experts. Set RANDOM_EXPERTS to draw more runs
than the suite does.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.megatron_zpp.train.stopped_runs import (
    ALL_THREE,
    require_no_digit_lost,
    require_numbers_of_one_rank,
)
from tests.megatron_zpp.train.training_runs import field, losses, run, with_json

# Ranks of tensor and context parallelism and of a pipeline, of 4.
SIZES = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)]
OF_EXPERTS = ["experts.gate", "experts.input", "experts.output"]
LAYERS = [*OF_EXPERTS, "attention.qkv", "attention.output", "output"]
KEPT = {"stage": 3, "zero_hpz_partition_size": 2}  # frozen weights in each node
RUNS = int(os.environ.get("RANDOM_EXPERTS", "2"))


class Drawn:
    """The flags of a model, and of the ranks that train it."""

    scores = ("softmax", "softmax", "sigmoid", "sqrtsoftplus")

    def __init__(self, seed: int, sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
        self.draw = draw = random.Random(seed)
        self.tensor, self.context, self.pipe = draw.choice(sizes)
        self.experts = draw.choice([4, 8, 8, 12])
        layers = self.pipe * draw.randint(1, 2)
        marks = [1] + [draw.randint(0, 1) for _ in range(layers - 1)]
        draw.shuffle(marks)
        self.splits_tokens = self.tensor * self.context > 1
        words = [
            f"--num-layers {layers} --hidden-size 32 --num-attention-heads 4 --swiglu",
            f"--ffn-hidden-size {8 * draw.randint(2, 4)} --moe-ffn-hidden-size "
            f"{4 * draw.randint(1, 5)} --num-experts {self.experts} --disable-bias-linear",
            f"--moe-layer-freq {str(marks).replace(' ', '')} --seq-length {8 * draw.randint(1, 3)}",
            "--position-embedding-type rope --normalization RMSNorm --init-method-std 0.2",
            "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0",
            f"--micro-batch-size 1 --global-batch-size {4 * draw.randint(1, 2)} --train-iters 3",
            f"--vocab-size {draw.randint(20, 60)} --lr 1e-3",
            draw.choice(["", "--clip-grad 0.1", "--calculate-per-token-loss --eod-mask-loss"]),
            *self.router(),
            *self.balance(),
        ]
        if draw.random() < 0.4:
            words.append(f"--moe-shared-expert-intermediate-size {8 * draw.randint(1, 3)}")
            words.append(draw.choice(["", "--moe-shared-expert-gate"]))
        if draw.random() < 0.3 and not self.splits_tokens:
            words += self.capacity()
        self.model = " ".join(words) + " "

    def router(self) -> list[str]:
        draw, k = self.draw, self.draw.randint(1, 3)
        score = draw.choice(self.scores)
        words = [f"--moe-router-topk {k} --moe-router-score-function {score}"]
        if score == "softmax":
            words.append("--moe-router-pre-softmax" if k == 1 or draw.random() < 0.5 else "")
        elif draw.random() < 0.7:
            rate = draw.choice([0.01, 100])
            words.append(f"--moe-router-enable-expert-bias --moe-router-bias-update-rate {rate}")
        if draw.random() < 0.3 and self.experts == 8:
            words.append("--moe-router-num-groups 4 --moe-router-group-topk 2")
            words.append("--moe-router-group-best 2")
        if draw.random() < 0.3:
            words.append("--moe-router-topk-scaling-factor 1.7")
        return words

    def capacity(self) -> list[str]:
        factor = self.draw.choice([0.5, 1.0, 1.5])
        policy = self.draw.choice(["probs", "position"])
        return [f"--moe-expert-capacity-factor {factor} --moe-token-drop-policy {policy}"]

    def balance(self) -> list[str]:
        draw = self.draw
        kinds = draw.choice([(), ("aux_loss",), ("seq_aux_loss",), ("aux_loss", "seq_aux_loss")])
        words = []
        if kinds:
            words.append(f"--moe-router-load-balancing-type {' '.join(kinds)}")
            words.append(f"--moe-aux-loss-coeff {' '.join(['0.3'] * len(kinds))}")
        if draw.random() < 0.5:
            words.append("--moe-z-loss-coeff 0.1")
        return words

    def adapters(self, base: Path) -> str:
        """Flags of adapters of layers of a trained model, in `base`; some of experts.

        Every stage of a pipeline has some, as it must train something.
        """
        draw = self.draw
        targets = {draw.choice(OF_EXPERTS), *draw.sample(LAYERS, draw.randint(0, 3))}
        targets |= {"attention.qkv"} if self.pipe > 1 else set()
        return (
            f"--pretrained-checkpoint {base} --lora-rank {draw.choice([1, 3, 4])} "
            f"--lora-target-modules {' '.join(sorted(targets))} "
        )

    def ranks(self, zero: dict | None = None) -> str:
        """The flags of the ranks, a JSON among them."""
        draw = self.draw
        per_node = 2 if zero else draw.choice([1, 2, 2])
        zero = zero or {"stage": draw.randint(0, 3)}
        zeropp = {"ranks_per_node": per_node, "reduce_gradients_once": draw.random() < 0.4}
        return self.axes(4) + with_json(zero, **zeropp)

    def axes(self, num_ranks: int) -> str:
        """The flags of the axes of the ranks that have a replica together."""
        draw, stage_ranks = self.draw, num_ranks // self.pipe
        sizes = [
            size
            for size in (1, 2, 4)
            if self.experts % size == stage_ranks % size == 0
            and (size == 1 or size % self.tensor == 0)
        ]
        size = draw.choice(sizes)
        words = [
            f"--tensor-model-parallel-size {self.tensor}",
            f"--context-parallel-size {self.context} --pipeline-model-parallel-size {self.pipe}",
            f"--expert-model-parallel-size {size}",
            draw.choice(["", "--recompute-granularity full", "--recompute-granularity selective"]),
        ]
        if self.tensor > 1 and (size > 1 or draw.random() < 0.5):
            words.append("--sequence-parallel")
        return " ".join(words)


@pytest.mark.parametrize("seed", range(RUNS))
def test_the_numbers_are_those_of_one_rank(seed: int, tmp_path: Path) -> None:
    """It stops after two iterations, and goes on with other ZeRO settings and expert ranks."""
    drawn = Drawn(seed)
    log, expected = require_numbers_of_one_rank(drawn.model, drawn.ranks, tmp_path)
    for name in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss"):
        numbers, others = (list(map(float, field(each, name))) for each in (log, expected))
        assert numbers == pytest.approx(others, rel=1e-5), name


@pytest.mark.parametrize("seed", range(RUNS // 2))
def test_adapters_learn_what_they_do_on_one_rank(seed: int, tmp_path: Path) -> None:
    """Some of experts, beside weights that train for a step first; with a stop as above."""
    drawn = Drawn(2000 + seed)
    run(1, f"{drawn.model} --train-iters 1 --save {tmp_path}/base", tmp_path)
    flags = f"{drawn.model} {drawn.adapters(tmp_path / 'base')} --lr 1e-2"

    def ranks() -> str:
        return drawn.ranks(drawn.draw.choice([KEPT, {"stage": 1}]))

    log, _ = require_numbers_of_one_rank(flags, ranks, tmp_path)
    assert len({*losses(log)}) == 3


@pytest.mark.parametrize("seed", range(RUNS // 2))
def test_with_zeropp_a_stop_changes_no_digit(seed: int, tmp_path: Path) -> None:
    drawn = Drawn(1000 + seed)
    flags = f"{drawn.model} {drawn.ranks(ALL_THREE)} --lr 1e-2 --bf16"
    second = require_no_digit_lost(flags, tmp_path)
    assert "whole codes cross the nodes once more" not in second
