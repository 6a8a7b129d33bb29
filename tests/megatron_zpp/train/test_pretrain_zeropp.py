"""The whole job with quantized weights, secondary copies and quantized gradients, 2 x 2 ranks."""

import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.train.evaluate import evaluate
from megatron_zpp.train.loop import VALIDATION, loader
from megatron_zpp.train.resume import load
from megatron_zpp.train.run import Run
from tests.megatron_zpp.train.pretraining import (
    assembled,
    field,
    log_of,
    losses,
    numbers,
    write_log,
)
from tests.ranks import ranks
from zeropp import InputError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/ds_zeropp_two_nodes.json"
ALL_THREE = f"--deepspeed_config {EXAMPLE} "
BATCH = "--micro-batch-size 2 --global-batch-size 16 "  # two micro-batches on each of 4 ranks
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
NUMBERS = "--log-params-norm "
CASES = {
    "fp32": "--untie-embeddings-and-output-weights ",
    "bf16": "--bf16 --eval-interval 3 --recompute-granularity full --recompute-method uniform ",
}
# INT8 in blocks of 256 rounds a weight by at most its block's largest / 254. In blocks of a normal
# distribution, whose largest is about 3 deviations, the error's norm is 3 / 254 / sqrt(3) = 0.7% of
# the weights' norm. The gradients' is 0.115 of theirs (INT8, then INT4).
WEIGHTS, GRADIENTS = 0.007, 0.115
DEVIATIONS = 6


@ranks(4, timeout=120)
def on_4(flags: str, path: Path) -> None:
    write_log(flags, path)


@ranks(2, timeout=120)
def on_2(flags: str, path: Path) -> None:
    write_log(flags, path)


@ranks(1, timeout=120)
def on_1(flags: str, path: Path) -> None:
    write_log(flags, path)


def run(num_ranks: int, flags: str, folder: Path) -> str:
    """The log of a run of `num_ranks`."""
    path = folder / "log.txt"
    {1: on_1, 2: on_2, 4: on_4}[num_ranks](flags=flags, path=path)
    return path.read_text()


def close(log: str, expected: list[float]) -> list[float]:
    """How far each loss of `log` may be from the unquantized one.

    To first order the weights' error moves a loss by its product with the gradient: both have n
    elements and know nothing of each other, so its deviation is the product of their norms over
    sqrt(n). The gradients' error changes by its own share what each step did to the loss, up or
    down.
    """
    num_parameters = int(re.search(r"([\d,]+) parameters", log)[1].replace(",", ""))
    share = DEVIATIONS * WEIGHTS / num_parameters**0.5
    before = (expected[0], *expected)
    moved = accumulate(abs(loss - last) for last, loss in zip(before, expected, strict=False))
    norms = zip(field(log, "grad norm"), field(log, "params norm"), strict=True)
    return [
        share * float(gradient) * float(weights) + GRADIENTS * so_far
        for (gradient, weights), so_far in zip(norms, moved, strict=True)
    ]


def written(folder: Path) -> list[dict]:
    """The log intervals of metrics.jsonl."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "lm_loss" in record]


@pytest.mark.parametrize("case", list(CASES))
@ranks(4, timeout=120)
def test_a_stop_in_the_middle_changes_no_digit(case, tmp_path):
    flags = f"{BATCH} {ALL_THREE} {CASES[case]} --train-iters 20 --lr-decay-style cosine "
    straight = log_of(flags)
    folder = f"--save {tmp_path} --load {tmp_path} "
    first, second = log_of(flags + folder + "--exit-interval 10"), log_of(flags + folder)
    if dist.get_rank() != 0:
        return
    assert len(losses(straight)) == 20 and len(losses(first)) == 10
    assert losses(first) + losses(second) == losses(straight)
    assert field(first, "grad norm") + field(second, "grad norm") == field(straight, "grad norm")


def test_losses_stay_close_to_the_unquantized_ones_and_repeat(tmp_path):
    flags = f"{BATCH} {NO_DROPOUT} {NUMBERS} --train-iters 20 "
    expected = numbers(run(4, f"{flags} --zero-stage 3", tmp_path))
    log = run(4, flags + ALL_THREE, tmp_path)
    assert losses(log) == losses(run(4, flags + ALL_THREE, tmp_path))
    assert numbers(log) != expected and expected[-1] < expected[0] - 0.05
    apart = [abs(one - other) for one, other in zip(numbers(log), expected, strict=True)]
    assert all(one < most for one, most in zip(apart, close(log, expected), strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resuming_on_other_ranks(num_ranks, tmp_path):
    flags = f"{BATCH} {NO_DROPOUT} {NUMBERS} --train-iters 20 {ALL_THREE} "
    straight = run(4, flags, tmp_path)
    folder = f"--save {tmp_path} --load {tmp_path} "
    run(4, flags + folder + "--exit-interval 10", tmp_path)
    second = run(num_ranks, flags + folder, tmp_path)
    expected = numbers(straight)
    apart = [abs(one - other) for one, other in zip(numbers(second), expected[10:], strict=True)]
    allowed = close(straight, expected)[10:]
    assert all(one < most for one, most in zip(apart, allowed, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
@ranks(4, timeout=120)
def test_stages_1_and_2_quantize_and_send_what_the_formula_says(stage, tmp_path):
    quantized = {"stage": stage, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    path = tmp_path / f"rank-{dist.get_rank()}.json"
    path.write_text(
        json.dumps({"zero_optimization": quantized, "zeropp": {"ranks_per_node": 2}})
    )
    flags = f"{BATCH} {NO_DROPOUT} {NUMBERS} --train-iters 10 "
    expected = numbers(log_of(f"{flags} --zero-stage {stage}"))
    log = log_of(f"{flags} --deepspeed_config {path} --tensorboard-dir {tmp_path}")
    if dist.get_rank() != 0:
        return
    apart = [abs(one - other) for one, other in zip(numbers(log), expected, strict=True)]
    assert all(one < most for one, most in zip(apart, close(log, expected), strict=True))
    for record in written(tmp_path):
        assert record["comm/across_nodes"] == record["comm/expected_across_nodes"] > 0
        assert record["comm/weights_backward_in_node"] == 0


@ranks(4)
def test_what_is_logged_is_the_formula_but_where_an_evaluation_left_copies(tmp_path):
    flags = f"{BATCH} {ALL_THREE} --train-iters 4 --eval-interval 2 --tensorboard-dir {tmp_path}"
    with assembled(flags) as run:
        formula = run.sharding.forecast.node(num_micro_batches=2)
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


@ranks(4, timeout=120)
def test_the_weights_cross_once_for_a_step_whatever_its_micro_batches(tmp_path):
    by_batch = []
    for size in (8, 32):
        folder = tmp_path / str(size)
        flags = f"--micro-batch-size 2 --global-batch-size {size} {ALL_THREE} --train-iters 1 "
        log_of(f"{flags} --tensorboard-dir {folder}")
        if dist.get_rank() == 0:
            by_batch.append(written(folder)[0])
    if dist.get_rank() == 0:
        one, four = by_batch
        weights, gradients = "comm/weights_forward_across_nodes", "comm/gradients_across_nodes"
        assert four[weights] == one[weights] > 0
        assert four[gradients] == 4 * one[gradients] > 0


@pytest.mark.parametrize(
    ("partition", "ranks_per_node", "said"),
    [(3, 2, "zero_hpz_partition_size = 3 does not divide the 4 ranks"),
     (2, 3, "zeropp.ranks_per_node = 3 does not divide the 4 ranks")],
)  # fmt: skip
@ranks(4)
def test_what_does_not_fit_the_ranks_ends_before_data_is_opened(
    partition, ranks_per_node, said, tmp_path
):
    path = tmp_path / f"rank-{dist.get_rank()}.json"
    zero = {"stage": 3, "zero_hpz_partition_size": partition}
    nodes = {"ranks_per_node": ranks_per_node}
    path.write_text(json.dumps({"zero_optimization": zero, "zeropp": nodes}))
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_zpp.train.inputs.resolve_data", lambda *_: opened.append(True))
        with pytest.raises(InputError, match=said):
            with assembled(f"{BATCH} --train-iters 1 --deepspeed_config {path}"):
                pass
    assert not opened


@ranks(4)
def test_weights_loaded_in_place_are_the_ones_that_are_evaluated(tmp_path):
    flags = f"{BATCH} {ALL_THREE} --train-iters 3 "
    log_of(f"{flags} --save {tmp_path}")
    with assembled(f"{flags} --load {tmp_path}") as run:
        fresh = validation_loss(run)
    with assembled(flags) as run:
        untrained = validation_loss(run)  # leaves copies of the untrained weights
        from_folder = replace(run.config.checkpoint, load=str(tmp_path))
        config = replace(run.config, checkpoint=from_folder)
        load(config, run.sharding, run.optimizer, run.scaler, run.tokenizer.fingerprint)
        assert validation_loss(run) == fresh != untrained


def validation_loss(run: Run) -> float:
    return evaluate(run.sharding, run.ranks, loader(run, VALIDATION, 0), 1)
