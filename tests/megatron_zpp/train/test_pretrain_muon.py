"""Runs with Muon: random models on random sizes of the axes, and stops that change no digit.

With whole matrices in fp32 all sizes print the numbers of one rank. Set RANDOM_MUON_RUNS to draw
more runs than the suite does.
"""

import os
import random
from pathlib import Path

import pytest

from tests.megatron_zpp.train.stopped_runs import (
    ALL_THREE,
    require_no_digit_lost,
    require_numbers_of_one_rank,
)
from tests.megatron_zpp.train.training_runs import losses, run, with_json

RUNS = int(os.environ.get("RANDOM_MUON_RUNS", "2"))
FIRST = 11  # then 13: more tensor ranks than key-value groups; and experts, split by tensor ranks
SIZES = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]


class Drawn:
    """The flags of a model, of Muon, and of the ranks."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.tensor, self.context, self.pipe = draw.choice(SIZES)
        self.has_experts = draw.random() < 0.4
        heads, groups = 4, draw.choice([1, 2, 4])
        words = [
            f"--num-layers {2 * self.pipe} --hidden-size {8 * draw.randint(3, 6)} --swiglu",
            f"--num-attention-heads {heads} --num-query-groups {groups} --disable-bias-linear",
            f"--ffn-hidden-size {4 * draw.randint(3, 12)} --seq-length {8 * draw.randint(1, 3)}",
            "--position-embedding-type rope --normalization RMSNorm --init-method-std 0.1",
            "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --train-iters 4",
            f"--global-batch-size {4 * draw.randint(1, 2)} --lr 1e-2 --optimizer muon",
            f"--vocab-size {draw.randint(20, 60)} --muon-fp32-matmul-prec highest",
            draw.choice(["", "--muon-nesterov"]),
            draw.choice(["", "--muon-no-split-qkv"]),
            draw.choice(["", "--decoupled-lr 3e-3"]),
            draw.choice(["", "--clip-grad 0.1"]),
            f"--muon-scale-mode {draw.choice(['spectral', 'unit_rms_norm', 'shape_scaling'])}",
            f"--muon-extra-scale-factor 0.2 --muon-momentum {draw.choice([0.5, 0.9])}",
        ]
        if self.has_experts:
            words.append("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12")
        self.model = " ".join(words) + " "

    def ranks(self, zero: dict | None = None, **zeropp: object) -> str:
        """The flags of the ranks, a JSON among them."""
        draw = self.draw
        if zero is None:
            zero = {"stage": draw.randint(0, 3)}
            if zero["stage"] and draw.random() < 0.3:
                zero["offload_optimizer"] = {"device": "cpu"}
        zeropp = {"ranks_per_node": 2, "muon_blocks": "whole"} | zeropp
        words = [
            f"--tensor-model-parallel-size {self.tensor} {with_json(zero, **zeropp)}",
            f"--context-parallel-size {self.context} --pipeline-model-parallel-size {self.pipe}",
            f"--muon-tp-mode {draw.choice(['duplicated', 'distributed'])}",
            draw.choice(["", "--recompute-granularity full"]),
        ]
        if self.tensor > 1:
            words.append(draw.choice(["", "--sequence-parallel"]))
        if self.has_experts:
            splits = self.tensor == 1 or "--sequence-parallel" in words
            sizes = [each for each in (1, 2, 4) if each % self.tensor == 4 // self.pipe % each == 0]
            size = draw.choice(sizes) if splits and sizes else 1
            words.append(f"--expert-model-parallel-size {size}")
        return " ".join(words)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2 * RUNS, 2))
def test_whole_matrices_give_the_numbers_of_one_rank(seed: int, tmp_path: Path) -> None:
    """It stops after two iterations, and goes on with other ZeRO settings."""
    drawn = Drawn(seed)
    require_numbers_of_one_rank(drawn.model, drawn.ranks, tmp_path)


@pytest.mark.parametrize("seed", range(RUNS // 2))
def test_with_zeropp_a_stop_changes_no_digit(seed: int, tmp_path: Path) -> None:
    """Blocks of nodes, and whole matrices, quantized, in every third step."""
    drawn = Drawn(1000 + seed)
    every = {"muon_blocks": "node", "muon_whole_every": 3, "weight_steps": drawn.pipe == 1}
    zero = ALL_THREE if drawn.tensor * drawn.context * drawn.pipe == 1 else {"stage": 3}
    every["weight_steps"] = zero is ALL_THREE
    flags = f"{drawn.model} {drawn.ranks(zero, **every)} --bf16"
    require_no_digit_lost(flags, tmp_path)


def test_it_goes_on_from_adamw_and_on_other_ranks(tmp_path: Path) -> None:
    """Momentum starts anew, with a line; on other ranks a line says why updates differ."""
    drawn = Drawn(0)
    flags = f"{drawn.model} --load {tmp_path}/saved --save {tmp_path}/saved --exit-interval 1"
    run(1, f"{flags} --optimizer adam", tmp_path)
    first = run(1, flags, tmp_path)
    assert "of 24 parameters starts anew: what was saved is another optimizer's" in first
    assert "optimizer is muon now, adam in the checkpoint: this changes the updates" in first
    changed = "--muon-num-ns-steps 4" + with_json(muon_whole_every=2)
    second = run(2, f"{flags} --zero-stage 3 {changed}", tmp_path)
    assert "muon_num_ns_steps is 4 now, 5 in the checkpoint: this changes the updates" in second
    changed = "muon_blocks node, muon_whole_every {}, ranks_per_node None on {} ranks".format
    assert f"{changed(2, 2)} now, {changed(None, 1)} in the checkpoint" in second
    assert len(losses(first) + losses(second)) == 2
