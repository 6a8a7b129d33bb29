"""What --dry-run predicts of mixtures of experts is what the fullest moment of real steps holds.

Set ALL_EXPERT_PEAKS to run all combinations.
"""

import itertools
import json
import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from benchmarks.memory.dry_run import predict_and_measure
from tests.megatron_zpp.parallel.flags import CP2, EP1, EP2, EP4, PP2, SP, TP2
from tests.megatron_zpp.planner.peaks import assert_peak_is_foretold
from tests.ranks import ranks

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 2 --swiglu --disable-bias-linear "
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq [0]+[1]*3 "
)
ONE, THREE = "--global-batch-size 8 ", "--global-batch-size 24 "
FULL, SELECTIVE = (f"--recompute-granularity {each} " for each in ("full", "selective"))
FP32, BF16 = "", "--bf16 "
SHARED = (
    "--moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate --moe-z-loss-coeff 1e-3 "
    "--moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32 "
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 32 --v-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --position-embedding-type rope "
)
CAPACITY = "--moe-expert-capacity-factor 1 --moe-router-force-load-balancing "
PLUS = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
HPZ = PLUS | {"zero_hpz_partition_size": 2}
STORED = {"zero_hpz_partition_size": 2, "zero_quantized_nontrainable_weights": True}
ADAPTERS = (
    "--lora-rank 4 --pretrained-checkpoint none "
    "--lora-target-modules attention.qkv mlp.experts.input mlp.experts.output "
)

CASES = [
    (EP1 + BF16 + THREE, {"stage": 3}),
    (EP2 + BF16 + THREE + FULL, {"stage": 3}),
    (EP4 + ONE, {"stage": 3}),
    (EP2 + BF16 + ONE + SHARED, {"stage": 3, **HPZ}),
    (EP1 + TP2 + SP + BF16 + ONE + SHARED + FULL, {"stage": 3, **HPZ}),
    (EP4 + BF16 + ONE + SELECTIVE + LATENT, {"stage": 2}),
    (EP2 + BF16 + ONE + CAPACITY, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
    (EP2 + PP2 + BF16 + THREE, {"stage": 3}),
    (EP2 + BF16 + ONE + ADAPTERS, {"stage": 3, **STORED}),
]


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


def all_combinations() -> Iterator[tuple[str, dict]]:
    """Expert ranks, other axes, formats, recomputation, micro-batches of a step, and stages."""
    for size, axes, kind, recomputed, samples, zero in itertools.product(
        (EP1, EP2, EP4),
        ("", TP2 + SP, CP2, PP2),
        (FP32, BF16 + SHARED, BF16 + LATENT),
        ("", FULL, FULL + "--recompute-num-layers 2 ", SELECTIVE),
        (ONE, THREE),
        ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, **HPZ}),
    ):
        if not (size == EP4 and PP2 in axes):  # a stage has two ranks
            yield size + axes + kind + recomputed + samples, zero


COMBINATIONS = [*all_combinations()] if os.environ.get("ALL_EXPERT_PEAKS") else CASES


@pytest.mark.parametrize(("flags", "zero"), COMBINATIONS)
@ranks(4, timeout=120, ranks_per_node=2)
def test_the_fullest_moment_is_foretold(flags: str, zero: dict, tmp_path) -> None:
    path = tmp_path / f"{dist.get_rank()}.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    assert_peak_is_foretold(f"{MODEL}{flags} --deepspeed-config {path}")
