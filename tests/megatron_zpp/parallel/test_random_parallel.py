"""Random models on random sizes of the axes print the losses and norms of one rank.

They stop on the way and go on with other ZeRO settings and on other nodes; with steps of codes they
go on with the same ones, to the last digit. Set RANDOM_PARALLEL to draw more runs than the suite
does.
"""

import os
import random
from pathlib import Path

import pytest

from tests.megatron_zpp.train.stopped_runs import require_no_digit_lost, require_numbers_of_one_rank
from tests.megatron_zpp.train.training_runs import with_json

# Ranks of tensor and context parallelism and of a pipeline, of 4.
SIZES = [
    (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2),
    (1, 2, 2),
]  # fmt: skip
STEPPED = [(1, 1, 2), (1, 1, 2), (1, 1, 1), (2, 1, 1), (1, 2, 1)]  # whose data axis has 2 or more
RUNS = int(os.environ.get("RANDOM_PARALLEL", "2"))


ALL_THREE = {
    "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 4,
    "zero_quantized_gradients": True,
}  # fmt: skip


class Drawn:
    """The flags of a model, and of the ranks that train it.

    With `steps`, weights cross nodes of one rank as steps of their codes, mostly of pipelines.
    """

    def __init__(self, seed: int, *, steps: bool = False) -> None:
        self.draw = draw = random.Random(seed)
        self.steps = steps
        self.draw_sizes()
        num_layers = self.pipe * self.chunks * draw.randint(1, 2)
        heads = draw.choice([4, 8])
        divisors = [each for each in (1, 2, 4, 8) if heads % each == 0]
        positions = draw.choice(["learned_absolute", "rope", "none"])
        model = [
            f"--num-layers {num_layers} --hidden-size {heads * draw.choice([4, 6])}",
            f"--num-attention-heads {heads} --num-query-groups {draw.choice(divisors)}",
            f"--ffn-hidden-size {4 * draw.randint(3, 9)} --position-embedding-type {positions}",
            f"--normalization {draw.choice(['LayerNorm', 'RMSNorm'])}",
            f"--vocab-size {draw.randint(20, 60)} --seq-length {8 * draw.randint(1, 3)}",
        ]
        for flag in (
            "--swiglu", "--untie-embeddings-and-output-weights", "--disable-bias-linear",
            "--fp32-residual-connection", "--apply-residual-connection-post-layernorm",
            "--reset-attention-mask", "--eod-mask-loss", "--reset-position-ids",
        ):  # fmt: skip
            if draw.random() < 0.4:
                model.append(flag)
        micro_batches = draw.randint(1, 3)
        self.model = " ".join(model) + (
            f" --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --train-iters 3 "
            f"--global-batch-size {4 * micro_batches} --lr 1e-3 --log-params-norm "
            f"{draw.choice(['', '--clip-grad 0.1', '--clip-grad 0'])} "
        )

    def draw_sizes(self) -> None:
        """Draw how many ranks share out the weights, the sequences and the layers."""
        self.tensor, self.context, self.pipe = self.draw.choice(STEPPED if self.steps else SIZES)
        self.chunks = self.draw.choice([1, 1, 2]) if self.pipe > 1 else 1

    def ranks(self) -> str:
        """The flags of the ranks, a JSON among them."""
        draw, stage = self.draw, self.draw.randint(0, 3)
        per_node = draw.choice([each for each in (1, 2, 4) if each % self.tensor == 0 or each == 1])
        zero, zeropp = {"stage": stage}, {"ranks_per_node": per_node}
        if stage == 3 and per_node > 1 and draw.random() < 0.6:
            zero["zero_hpz_partition_size"] = per_node
        zeropp["reduce_gradients_once"] = draw.random() < 0.4
        if self.steps:
            steps = {"weight_steps": True, "code_messages": draw.random() < 0.7}
            zero, zeropp = ALL_THREE, zeropp | {"ranks_per_node": 1} | steps
        words = [
            f"--tensor-model-parallel-size {self.tensor}",
            f"--context-parallel-size {self.context} {with_json(zero, **zeropp)}",
            f"--pipeline-model-parallel-size {self.pipe}",
            draw.choice(["", "--recompute-granularity full", "--recompute-granularity selective"]),
        ]
        if self.tensor > 1 and draw.random() < 0.6:
            words.append("--sequence-parallel")
        if self.context > 1:
            words.append(f"--cp-comm-type {draw.choice(['a2a', 'allgather'])}")
        if self.chunks > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.chunks}")
        return " ".join(words)


@pytest.mark.parametrize("seed", range(RUNS))
def test_the_numbers_are_those_of_one_rank(seed: int, tmp_path: Path) -> None:
    """It stops after two iterations, and goes on with other ZeRO settings and nodes."""
    drawn = Drawn(seed)
    log, _ = require_numbers_of_one_rank(drawn.model, drawn.ranks, tmp_path)
    assert "(formula: " not in log  # of bytes, where it is not what was counted


@pytest.mark.parametrize("seed", range(RUNS // 2))
def test_with_steps_of_codes_a_stop_changes_no_digit(seed: int, tmp_path: Path) -> None:
    drawn = Drawn(seed, steps=True)
    flags = f"{drawn.model} {drawn.ranks()} --lr 1e-2"
    second = require_no_digit_lost(flags, tmp_path)
    assert "whole codes cross the nodes once more" not in second
