"""Training with quantized weights, secondary copies and quantized gradients on 2 nodes of 2."""

import json
import math
import re
from dataclasses import replace
from operator import lt
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.train.inputs import VALIDATION
from megatron_zpp.train.resume import load, saved_run
from megatron_zpp.train.run import Run
from tests.megatron_zpp.train.training_runs import (
    built_run,
    field,
    log_of,
    loss_values,
    run,
    with_json,
)
from tests.ranks import ranks
from zeropp import InputError
from zeropp.sharding.forecast import node_bytes

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/ds_zeropp_two_nodes.json"
ALL_THREE = f"--deepspeed_config {EXAMPLE} "
BATCH = "--micro-batch-size 2 --global-batch-size 16 "  # two micro-batches on each of 4 ranks
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
NUMBERS = "--log-params-norm "
UNQUANTIZED = f"{BATCH} {NO_DROPOUT} {NUMBERS} --train-iters 6 "
QUANTIZED = UNQUANTIZED + ALL_THREE
# INT8 in blocks of 256 rounds a weight by at most its block's largest / 254. In blocks of a normal
# distribution, whose largest is about 3 deviations, the error's norm is 3 / 254 / sqrt(3) = 0.7% of
# the weights' norm. The gradients' is 0.118 of theirs (INT8, then INT4), which turns the sign of
# arctan(0.118) / pi of them, if both are normal.
WEIGHTS, TURNED = 0.007, math.atan(0.118) / math.pi
LEARNING_RATE = 1e-2  # of TINY, at most
DEVIATIONS = 6


def close(log: str) -> list[float]:
    """How far each loss of `log` may be from the unquantized one.

    To first order the weights' error moves a loss by its product with the gradient: both have n
    elements and know nothing of each other, so its deviation is the product of their norms over
    sqrt(n). Adam moves a weight by at most the learning rate in its first steps, against the sign
    of its gradient. Where an error turns the sign, the weight is off by twice as much: over all of
    them by the norm 2 lr sqrt(n TURNED), and after k steps, whose errors know nothing of each
    other, by sqrt(k) times that.
    """
    num_parameters = int(re.search(r"([\d,]+) parameters", log)[1].replace(",", ""))
    norms = zip(field(log, "grad norm"), field(log, "params norm"), strict=True)
    return [
        DEVIATIONS
        * float(gradient)
        * (
            WEIGHTS * float(weights) / num_parameters**0.5
            + 2 * LEARNING_RATE * (TURNED * steps) ** 0.5
        )
        for steps, (gradient, weights) in enumerate(norms)
    ]


def written(folder: Path) -> list[dict]:
    """The log intervals of metrics.jsonl."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "lm_loss" in record]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint of 4 ranks after half of `QUANTIZED`, and the log of all of it."""
    folder = tmp_path_factory.mktemp("stopped")
    straight = run(4, f"{QUANTIZED} --save {folder}/save --save-interval 3", folder)
    return folder / "save", straight


def test_losses_stay_close_to_the_unquantized_ones(stopped, tmp_path):
    expected = loss_values(run(4, f"{UNQUANTIZED} --zero-stage 3", tmp_path))
    _, log = stopped
    assert loss_values(log) != expected and expected[-1] < expected[0] - 0.04
    differences = [
        abs(loss - expected_loss)
        for loss, expected_loss in zip(loss_values(log), expected, strict=True)
    ]
    assert all(map(lt, differences, close(log)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resuming_on_other_ranks(num_ranks, stopped, tmp_path):
    saved, straight = stopped
    second = run(num_ranks, f"{QUANTIZED} --load {saved} --ckpt-step 3", tmp_path)
    expected = loss_values(straight)
    pairs = zip(loss_values(second), expected[3:], strict=True)
    differences = [abs(loss - expected_loss) for loss, expected_loss in pairs]
    assert all(map(lt, differences, close(straight)[3:]))


@pytest.mark.parametrize("stage", [1, 2])
@ranks(4, timeout=120)
def test_stages_1_and_2_quantize_and_send_what_the_formula_says(stage, tmp_path):
    quantized = {"stage": stage, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    flags = f"{BATCH} {NO_DROPOUT} {NUMBERS} --train-iters 3 "
    expected = loss_values(log_of(f"{flags} --zero-stage {stage}"))
    log = log_of(f"{flags} {with_json(quantized, ranks_per_node=2)} --tensorboard-dir {tmp_path}")
    if dist.get_rank() != 0:
        return
    differences = [
        abs(loss - expected_loss)
        for loss, expected_loss in zip(loss_values(log), expected, strict=True)
    ]
    assert all(difference < most for difference, most in zip(differences, close(log), strict=True))
    for record in written(tmp_path):
        assert record["comm/across_nodes"] == record["comm/expected_across_nodes"] > 0
        assert record["comm/weights_backward_in_node"] == 0


@ranks(4)
def test_what_is_logged_is_the_formula_but_where_an_evaluation_left_copies(tmp_path):
    flags = f"{BATCH} {ALL_THREE} --train-iters 4 --eval-iters 1 --eval-interval 2 "
    flags += f"--tensorboard-dir {tmp_path}"
    with built_run(flags) as run:
        formula = node_bytes(run.trainer.sharding.plan, 2)
    log = log_of(flags)
    if dist.get_rank() != 0:
        return
    records = written(tmp_path)
    names = {f"comm/{purpose}_{hop}": sent for (purpose, hop), sent in formula.items()}
    assert all(records[index][name] == names[name] for index in (0, 1, 3) for name in names)
    assert names["comm/weights_backward_across_nodes"] == 0
    saved = names["comm/weights_forward_across_nodes"]
    assert saved > 0 and records[2]["comm/weights_forward_across_nodes"] == 0
    assert records[2]["comm/expected_across_nodes"] - records[2]["comm/across_nodes"] == saved
    assert "error" not in log and re.search(r"across nodes: 0\.\d\d \(formula: 0\.\d\d\) \|", log)


@pytest.mark.parametrize(
    ("partition", "ranks_per_node", "message"),
    [(3, 2, "zero_hpz_partition_size = 3 does not divide the 4 ranks"),
     (2, 3, "zeropp.ranks_per_node = 3 does not divide the 4 ranks")],
)  # fmt: skip
@ranks(4)
def test_what_does_not_fit_the_ranks_ends_before_data_is_opened(partition, ranks_per_node, message):
    zero = {"stage": 3, "zero_hpz_partition_size": partition}
    flags = f"{BATCH} --train-iters 1 {with_json(zero, ranks_per_node=ranks_per_node)}"
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_zpp.train.inputs.resolve_data", lambda *_: opened.append(True))
        with pytest.raises(InputError, match=message):
            with built_run(flags):
                pass
    assert not opened


@ranks(4)
def test_weights_loaded_in_place_are_the_ones_that_are_evaluated(tmp_path):
    flags = f"{BATCH} {ALL_THREE} --train-iters 1 --eval-iters 1 "
    log_of(f"{flags} --save {tmp_path}")
    with built_run(f"{flags} --load {tmp_path}") as run:
        fresh = validation_loss(run)
    with built_run(flags) as run:
        untrained = validation_loss(run)  # leaves copies of the untrained weights
        from_folder = replace(run.config.checkpoint, load=str(tmp_path))
        trainer = replace(run.trainer, config=replace(run.config, checkpoint=from_folder))
        load(replace(run, trainer=trainer), saved_run(from_folder, run.ranks))
        assert validation_loss(run) == fresh != untrained


def validation_loss(run: Run) -> float:
    return run.trainer.evaluate(run.batches.loader(VALIDATION, 0), 1)
