"""What --dry-run predicts of mixtures of experts is what the fullest moment of real steps holds.

Set ALL_EXPERT_PEAKS to run all combinations of axes, formats, recomputation and stages.
"""

import itertools
import os
from collections.abc import Iterator

import pytest

from benchmarks.memory.dry_run import predict_and_measure
from tests.megatron_zpp.parallel.flags import CP2, EP1, EP2, EP4, PP2, SP, TP2
from tests.megatron_zpp.planner.test_peaks import (
    BF16,
    DEEP,
    EIGHT,
    FP32,
    FULL,
    HPZ,
    KEPT,
    LORA,
    MANY,
    SELECTIVE,
    assert_peak_is_foretold,
    offloaded,
)  # fmt: skip
from tests.megatron_zpp.train.training_runs import with_json
from tests.ranks import ranks

MOE = DEEP + (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-layer-freq [0]+[1]*3 "
)
SHARED = (
    "--moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate --moe-z-loss-coeff 1e-3 "
    "--moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32 "
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 32 --v-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --position-embedding-type rope "
)
CAPACITY = "--moe-expert-capacity-factor 1 --moe-router-force-load-balancing "
OF_EXPERTS = (
    "--lora-target-modules attention.qkv mlp.experts.input mlp.experts.output "
)  # fmt: skip
OF_MIXTURES = [
    EP1 + BF16 + MANY + with_json({"stage": 3}),
    EP2 + BF16 + MANY + FULL + with_json({"stage": 3}),
    EP4 + EIGHT + with_json({"stage": 3}),
    EP2 + BF16 + EIGHT + SHARED + with_json(HPZ),
    EP1 + TP2 + SP + BF16 + EIGHT + SHARED + FULL + with_json(HPZ),
    EP4 + BF16 + EIGHT + SELECTIVE + LATENT + with_json({"stage": 2}),
    EP2 + BF16 + EIGHT + CAPACITY + with_json(offloaded(1)),
    EP2 + PP2 + BF16 + MANY + with_json({"stage": 3}),
    EP2 + BF16 + EIGHT + LORA + OF_EXPERTS + with_json(KEPT),
]


def all_mixtures() -> Iterator[str]:
    for size, axes, kind, recomputed, samples, zero in itertools.product(
        (EP1, EP2, EP4),
        ("", TP2 + SP, CP2, PP2),
        (FP32, BF16 + SHARED, BF16 + LATENT),
        ("", FULL, FULL + "--recompute-num-layers 2 ", SELECTIVE),
        (EIGHT, MANY),
        ({"stage": 1}, {"stage": 2}, {"stage": 3}, HPZ),
    ):
        if not (size == EP4 and PP2 in axes):  # a stage has two ranks
            yield size + axes + kind + recomputed + samples + with_json(zero)


if os.environ.get("ALL_EXPERT_PEAKS"):
    OF_MIXTURES = [*all_mixtures()]


@pytest.mark.parametrize("flags", OF_MIXTURES)
@ranks(4, timeout=120, ranks_per_node=2)
def test_mixtures_on_two_nodes_of_two(flags):
    assert_peak_is_foretold(MOE + flags)


@ranks(1)
def test_a_step_keeps_no_assignments_of_tokens_of_earlier_micro_batches():
    """Of each token its experts, and each expert's tokens: 16 bytes for each of the two."""
    flags = (
        "--num-layers 4 --hidden-size 16 --num-attention-heads 1 --seq-length 256 "
        "--micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 --disable-bias-linear "
        "--num-experts 8 --moe-router-topk 8 --moe-ffn-hidden-size 16 --global-batch-size "
    )
    (_, few), (_, many) = (predict_and_measure(f"{flags}{size}") for size in (3, 9))
    assert many - few < 16 * 4 * 256 * 8
