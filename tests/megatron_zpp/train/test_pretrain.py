"""Pretraining on several ranks: all stages agree, and a resumed run prints the same losses."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint.training_state import TrainingState, run_settings
from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.resume import _log_other_settings
from tests.megatron_zpp.train.training_runs import field, log_of, loss_values, losses, run
from tests.ranks import ranks
from zeropp import InputError

BATCH = "--micro-batch-size 2 --global-batch-size 16 "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
RESUMED = BATCH + NO_DROPOUT + "--train-iters 4 "
PRECISIONS = {
    "fp32": "",
    "bf16": "--bf16 ",
    "fp16": "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1 ",
}
RELATIVE = 1e-5  # the promise for unquantized fp32 runs, whatever the stage and the ranks


def test_losses_agree_at_every_stage_and_on_one_rank(tmp_path):
    flags = "--micro-batch-size 2 --global-batch-size 8 " + NO_DROPOUT + "--train-iters 6 "
    expected = loss_values(run(1, flags, tmp_path))
    assert len(expected) == 6 and expected[-1] < expected[0]
    for stage, num_ranks in enumerate((2, 4, 2, 4)):
        log = run(num_ranks, f"{flags} --zero-stage {stage}", tmp_path)
        assert loss_values(log) == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 1), ("bf16", 3), ("fp16", 3)])
@ranks(2, timeout=120)
def test_a_stop_in_the_middle_changes_no_digit(precision, stage, tmp_path):
    flags = f"{PRECISIONS[precision]} --zero-stage {stage} --train-iters 6 "
    flags += "--micro-batch-size 2 --global-batch-size 8 --dataloader-type cyclic "
    flags += "--lr-warmup-iters 2 --lr-decay-style cosine "
    straight = log_of(flags)
    first = log_of(flags + f"--save {tmp_path} --exit-interval 4")
    second = log_of(flags + f"--load {tmp_path} ")
    if dist.get_rank() != 0:
        return
    assert len(losses(straight)) == 6 and len(losses(first)) == 4
    assert losses(first) + losses(second) == losses(straight)
    for name in ("grad norm", "learning rate", "loss scale", "consumed samples"):
        assert field(first, name) + field(second, name) == field(straight, name)
    if precision == "fp16":
        assert len(set(field(straight, "loss scale"))) > 1  # it moved, and came back right
        assert field(straight, "number of skipped iterations").count("0") >= 4


@ranks(2, timeout=120)
def test_saving_beside_training_changes_no_digit(tmp_path):
    flags = f"{BATCH} --zero-stage 3 --bf16 --train-iters 4 "
    straight = log_of(flags)
    folder = f"--save {tmp_path} --load {tmp_path} --async-save --save-retain-interval 3 "
    first = log_of(flags + folder + "--save-interval 1 --exit-interval 3")
    second = log_of(flags + folder + "--no-verify-checkpoint")
    if dist.get_rank() != 0:
        return
    assert losses(first) + losses(second) == losses(straight) and len(losses(first)) == 3
    # A checkpoint is complete when the next one is saved, and the last one when the run ends.
    saved = re.findall(r"saved checkpoint \S+iter_(\d+)", first)
    assert [int(number) for number in saved] == [1, 2, 3]
    assert re.search("removed .*iter_0000001: --save-retain-interval 3\n", first)
    assert first.index("iter_0000003") < first.index("stopping after")
    assert "saved checkpoint" in second
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint of 4 ranks at stage 3 after half of `RESUMED`, and the log of all of it."""
    folder = tmp_path_factory.mktemp("stopped")
    straight = run(4, f"{RESUMED} --zero-stage 3 --save {folder}/save --save-interval 2", folder)
    return folder / "save", straight


@pytest.mark.parametrize("then", [(2, 3), (1, 1), (4, 0)])
def test_resuming_on_other_ranks_and_another_stage(then, stopped, tmp_path):
    saved, straight = stopped
    flags = f"{RESUMED} --load {saved} --ckpt-step 2 --zero-stage {then[1]}"
    second = run(then[0], flags, tmp_path)
    assert loss_values(second) == pytest.approx(loss_values(straight)[2:], rel=RELATIVE)


def test_dropout_does_not_depend_on_the_number_of_ranks(tmp_path):
    flags = BATCH + "--train-iters 3 "
    alone = run(1, flags, tmp_path)
    assert loss_values(run(2, flags + "--zero-stage 2", tmp_path)) == pytest.approx(
        loss_values(alone), rel=RELATIVE
    )


def test_a_longer_run_with_fewer_evaluations_resumes(tmp_path):
    flags = f"{BATCH} --save {tmp_path} --load {tmp_path} --lr-decay-style constant "
    run(1, flags + "--train-iters 4 --eval-iters 1 --eval-interval 1", tmp_path)
    log = run(1, flags + "--train-iters 6 --eval-iters 1 --eval-interval 100", tmp_path)
    assert len(losses(log)) == 2
    assert "validation loss at the end of training" in log


def test_a_growing_batch_resumes_at_its_size(tmp_path):
    flags = "--micro-batch-size 2 --rampup-batch-size 4 4 24 --global-batch-size 12 "
    flags += "--train-samples 90 --eval-iters 1 --eval-interval 2 "
    straight = run(2, flags, tmp_path)
    folder = f"--save {tmp_path} --load {tmp_path} "
    first = run(2, flags + folder + "--exit-interval 3", tmp_path)
    second = run(2, flags + folder, tmp_path)
    sizes = field(straight, "global batch size")
    assert set(sizes) == {"4", "8", "12"} and sizes == sorted(sizes, key=int)
    assert losses(first) + losses(second) == losses(straight)
    held_out = [re.findall(r"loss at .*? value: (\S+)", log) for log in (first, second, straight)]
    assert held_out[0] + held_out[1] == held_out[2]


def test_finetune_loads_the_weights_and_starts_at_iteration_0(tmp_path):
    flags = BATCH + NO_DROPOUT + f"--train-iters 4 --eval-iters 1 --load {tmp_path} "
    run(1, flags + f"--save {tmp_path}", tmp_path)
    tuned = run(1, flags + "--finetune --lr 2e-3", tmp_path)
    only_evaluated = run(1, flags + "--skip-train --finetune", tmp_path)
    assert len(losses(tuned)) == 4 and field(tuned, "consumed samples")[0] == "16"
    assert losses(only_evaluated) == []
    assert "validation loss at the end of training" in only_evaluated


def test_finetune_takes_longer_texts_and_another_rotary_base(tmp_path):
    flags = BATCH + "--position-embedding-type rope --train-iters 1 "
    run(1, flags + f"--save {tmp_path}/short", tmp_path)
    longer = f"{flags} --seq-length 32 --rotary-base 500000 --save {tmp_path}/long "
    log = run(1, f"{longer} --load {tmp_path}/short --finetune", tmp_path)
    assert "--finetune: rotary_base is 10000.0 in the checkpoint, 500000.0 in the model" in log
    resumed = run(
        1,
        f"{longer} --load {tmp_path}/long --train-iters 2 --override-opt_param-scheduler",
        tmp_path,
    )
    assert len(losses(log)) == len(losses(resumed)) == 1 and "--finetune" not in resumed


def test_the_shape_of_the_checkpoint(tmp_path):
    flags = f"{BATCH} --load {tmp_path} "
    run(1, flags + f"--save {tmp_path} --train-iters 2 --swiglu --exit-interval 1", tmp_path)
    other = "--num-layers 7 --kv-channels 8 --normalization LayerNorm --num-attention-heads 4 "
    other += "--use-rope-scaling --geglu "
    log = run(1, flags + other + "--train-iters 2 --use-checkpoint-args", tmp_path)
    lines = [line for line in log.splitlines() if line.startswith("--use-checkpoint-args: ")]
    assert sorted(line.removeprefix("--use-checkpoint-args: ") for line in lines) == [
        "geglu is False, and --geglu has no effect",
        "kv_channels is None, and --kv-channels 8 has no effect",
        "num_layers is 2, and --num-layers 7 has no effect",
        "swiglu is True",
        "use_rope_scaling is False, and --use-rope-scaling has no effect",
    ]
    assert len(losses(log)) == 1


def test_ckpt_step_goes_back_to_an_older_checkpoint(tmp_path):
    flags = f"{BATCH} --train-iters 4 --save {tmp_path} --load {tmp_path} --save-interval 1 "
    straight = losses(run(1, flags, tmp_path))
    back = run(1, flags + "--ckpt-step 2", tmp_path)
    assert f"loaded checkpoint of iteration 2 from {tmp_path}" in back
    assert losses(back) == straight[2:]


@ranks(1, timeout=120)
def load_step(flags: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        log_of(flags)


def test_a_ckpt_step_that_is_not_there_names_those_that_are(tmp_path):
    flags = f"{BATCH} --train-iters 2 --save {tmp_path} --load {tmp_path} --save-interval 1 "
    run(1, flags, tmp_path)
    load_step(flags=flags + "--ckpt-step 7", expected="--ckpt-step 7: .* it has those of 1, 2")


def test_no_load_lr_state_starts_the_schedule_again(tmp_path):
    flags = f"{BATCH} --save {tmp_path} --load {tmp_path} --lr-warmup-iters 2 "
    first = run(1, flags + "--train-iters 4", tmp_path)
    later = run(1, flags + "--train-iters 6 --no-load-lr-state --lr-decay-style cosine", tmp_path)
    rates = field(later, "learning rate")
    assert rates[0] == field(first, "learning rate")[0] and len(losses(later)) == 2
    assert field(later, "consumed samples")[0] == "80"


def test_other_samples_and_updates_are_logged(tmp_path):
    flags = f"{BATCH} --train-iters 4 --save {tmp_path} --load {tmp_path} "
    first = run(1, flags + "--exit-interval 2 --num-workers 0", tmp_path)
    second = run(
        1,
        flags + "--seed 7 --clip-grad 2 --global-batch-size 32 --override-opt_param-scheduler",
        tmp_path,
    )
    assert "which samples come next" not in first
    assert "the global batch has 32 samples, but 16 in the checkpoint" in second
    assert "seed is 7 now, 1234 in the checkpoint: this changes which samples" in second
    assert "clip_grad is 2.0 now, 1.0 in the checkpoint: this changes the updates" in second


def test_a_longer_run_goes_on_with_the_order_of_the_checkpoint(tmp_path):
    """Four of the 16 samples of a step are one epoch, so that lengths give other orders."""
    documents = [[np.full(33, number)] for number in range(4)]
    write_dataset(tmp_path / "text", 257, documents)
    flags = f"{BATCH} --data-path {tmp_path}/text --split 1 --tokenizer-type ByteLevelTokenizer "
    flags += f"--save {tmp_path} --load {tmp_path} --seq-length 32 --eval-iters 0 --num-workers 0 "
    first = run(1, flags + "--train-iters 2", tmp_path)
    second = run(1, flags + "--train-iters 3 --lr-decay-iters 2", tmp_path)
    third = run(1, flags + "--train-iters 4 --lr-decay-iters 2", tmp_path)
    said = "which samples come next"
    assert said not in first
    for log, before, now in ((second, 32, 48), (third, 48, 64)):
        assert f"made for {before}, and this run asks for {now}: it goes on behind" in log
    state = json.loads((tmp_path / "iter_0000004" / "state.json").read_text())
    assert [sizes[0] for sizes in state["sample_sizes"]] == [32, 48, 64]
    write_dataset(tmp_path / "text", 257, documents * 2)
    fourth = run(1, flags + "--train-iters 5 --lr-decay-iters 2", tmp_path)
    assert f"text.bin has 528 bytes now, 264 in the checkpoint: this changes {said}" in fourth


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("text", ["train_iters is 3 now, 2 in the checkpoint"]),
        ("q.jsonl", ["the checkpoint's version read special tokens in texts as ordinary text"]),
    ],
)
def test_a_checkpoint_of_an_older_version(data, expected, caplog):
    """It has neither sizes of datasets, nor the flag of special tokens."""
    flags = f"--data-path {data} --tokenizer-type HFTokenizer --tokenizer-model x --num-layers 1 "
    flags += "--hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    before, now = (parse((flags + f"--train-iters {n}").split(), 1) for n in (2, 3))
    configuration = json.loads(json.dumps(run_settings(before)))
    del configuration["tokenizer"]["tokenizer_hf_no_include_special_tokens"]
    state = TrainingState(
        iteration=2, consumed_samples=2, consumed_tokens=16, seed=1234, world_size=1, stage=0,
        tokenizer="", configuration=configuration,
    )  # fmt: skip
    caplog.set_level(logging.INFO, "megatron_zpp")
    _log_other_settings(now, state)
    said = ": this changes which samples come next"
    assert [line.removesuffix(said) for line in caplog.messages if said in line] == expected


def test_reset_iteration_keeps_the_loss_scale(tmp_path):
    flags = f"{BATCH} --fp16 --train-iters 2 --save {tmp_path} --load {tmp_path} "
    first = run(1, flags + "--initial-loss-scale 1024 --loss-scale-window 1", tmp_path)
    assert [float(scale) for scale in field(first, "loss scale")] == [1024, 2048]
    again = run(1, flags + "--reset-iteration", tmp_path)
    assert [float(scale) for scale in field(again, "loss scale")] == [4096, 4096]


def test_a_finished_run_says_so_and_evaluates(tmp_path):
    flags = f"{BATCH} --train-iters 3 --eval-iters 1 --save {tmp_path} --load {tmp_path} "
    run(2, flags, tmp_path)
    again = run(2, flags + "--sample-prompt 1 --sample-length 5", tmp_path)
    assert "training is complete: 3 iterations are done" in again
    assert "validation loss at the end of training" in again
    assert "Sample" in again and losses(again) == []
    load_step(flags=flags + "--sample-prompt a\udcff", expected="--sample-prompt: .* is not UTF-8")
