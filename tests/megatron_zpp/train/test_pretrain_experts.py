"""Whole runs of mixtures of experts: other programs' arguments, and their curves."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.megatron_zpp.settings.tables import launch_scripts
from tests.megatron_zpp.train.training_runs import (
    field,
    held_out,
    log_of,
    loss_values,
    run,
)
from tests.ranks import ranks

LLAMA = (
    "--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
)
SIGMOID = LLAMA + (
    "--num-layers 4 --num-experts 8 --moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 24 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 "
    "--moe-router-bias-update-rate 0.01 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 16 --micro-batch-size 1 --global-batch-size 8 "
)
SCRIPTS = {
    name: script.flags
    for name, script in launch_scripts().items()
    if "--num-experts" in script.flags
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_of_other_programs_train(script: str, tmp_path: Path) -> None:
    flags = SCRIPTS[script]
    log = run(4, f"{flags} --exit-interval 2", tmp_path)
    assert len(loss_values(log)) == 2
    balance = field(log, " load_balancing_loss") + field(log, "seq_load_balancing_loss")
    assert len(balance) == (0 if "balancing-type none" in flags else 2)
    assert all(0.9 < float(loss) < 3 for loss in balance)


@ranks(2, timeout=120)
def test_it_learns_evaluates_samples_and_writes_curves(tmp_path: Path) -> None:
    """The held-out loss falls, as it would not if biases or counts came from evaluation."""
    log = log_of(
        f"{SIGMOID}--train-iters 10 --zero-stage 3 --eval-iters 2 --eval-interval 5 "
        f"--tensorboard-dir {tmp_path} --moe-per-layer-logging --sample-prompt 1 "
        "--sample-length 4 --moe-expert-capacity-factor 1.5 "
    )
    if dist.get_rank() != 0:
        return
    losses = loss_values(log)
    assert losses[-1] < losses[0]
    first, second, *_ = map(float, held_out(log))
    assert second < first
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "load_balancing_loss" in line]
    assert len(steps) == 10
    for name in ("load_balancing_loss", "z_loss"):
        by_layer = [steps[0][f"moe/{name}_layer_{layer}"] for layer in (1, 2, 3)]
        assert steps[0][name] == pytest.approx(sum(by_layer) / 3)
        assert f"moe/{name}_layer_0" not in steps[0]
    assert all(step["experts/busiest rank"] >= 1 for step in steps)
