"""Runs that stop and go on print the digits of runs that do not, whatever they hold."""

import json
from pathlib import Path

import pytest

from tests.launched import ROOT
from tests.megatron_zpp.parallel.flags import CP2, LENGTH, ONE_GROUP, PP2, SP, TP2
from tests.megatron_zpp.train.training_runs import field, require_same_digits_after_a_stop

CYCLIC = (
    "--train-iters 6 --micro-batch-size 2 --global-batch-size 8 --dataloader-type cyclic "
    "--lr-warmup-iters 2 --lr-decay-style cosine "
)
GROWING = (
    "--micro-batch-size 2 --rampup-batch-size 4 4 24 --global-batch-size 12 --train-samples 90 "
    "--eval-iters 1 --eval-interval 2 "
)
DECOUPLED = (
    "--mock-data --micro-batch-size 2 --train-iters 4 --weight-decay 0.1 --decoupled-lr 3e-3 "
    "--decoupled-min-lr 1e-3 --lr-warmup-iters 2 "
)
TWO_NODES = ROOT / "examples/ds_zeropp_two_nodes.json"
ZEROPP = (
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr-decay-style cosine "
    "--deepspeed_config "
)
EVALUATED = " --eval-iters 1 --eval-interval 2 "
RECOMPUTED = " --recompute-granularity full --recompute-method uniform "
# With everything that keeps values between steps: copies as codes, biases, moments.
EXPERTS = (
    "--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--num-layers 4 --num-experts 8 --moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 24 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 "
    "--moe-router-bias-update-rate 0.01 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 16 --micro-batch-size 1 --global-batch-size 8 --bf16 "
    f"--train-iters 4 --deepspeed_config {ROOT}/examples/ds_code_steps_two_nodes.json "
)


def coded_steps() -> str:
    """The example of two nodes with coded incremental updates, as the text of a JSON."""
    settings = json.loads(TWO_NODES.read_text())
    settings["zeropp"] |= {"weight_steps": True, "code_messages": True}
    return json.dumps(settings, separators=(",", ":"))


RUNS = {
    "fp32": (2, "--zero-stage 1 " + CYCLIC, 4),
    "bf16": (2, "--bf16 --zero-stage 3 " + CYCLIC, 4),
    "growing batch": (2, GROWING, 3),
    "rates of their own": (1, DECOUPLED, 2),
    "context": (2, f"{LENGTH} {CP2} --zero-stage 3 --bf16 ", 2),
    "tensor": (4, f"{LENGTH} {TP2} {SP} {ONE_GROUP} --zero-stage 3 --bf16 ", 2),
    "pipeline": (
        4, f"{LENGTH} {PP2} {TP2} {SP} --num-layers 4 --bf16 --log-num-zeros-in-grad ", 2,
    ),
    "ZeRO++, bf16": (4, f"{ZEROPP} {TWO_NODES} --bf16" + EVALUATED + RECOMPUTED, 2),
    "coded steps": (
        4, f"{ZEROPP} {coded_steps()} --untie-embeddings-and-output-weights {EVALUATED}", 3,
    ),
    "experts": (4, EXPERTS, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_stop_in_the_middle_changes_no_digit(name: str, tmp_path: Path) -> None:
    num_ranks, flags, stop = RUNS[name]
    straight, _ = require_same_digits_after_a_stop(num_ranks, flags, tmp_path, stop)
    if name == "growing batch":
        sizes = field(straight, "global batch size")
        assert set(sizes) == {"4", "8", "12"} and sizes == sorted(sizes, key=int)


def test_the_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    fp16 = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1 --zero-stage 3 "
    straight, _ = require_same_digits_after_a_stop(2, fp16 + CYCLIC, tmp_path, 4)
    assert len(set(field(straight, "loss scale"))) > 1
    assert field(straight, "number of skipped iterations").count("0") >= 4
