"""Pretraining on several ranks: all stages agree, a resumed run prints the same; its report."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint.training_state import TrainingState
from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.monitor.report.run_record import PLAIN, SENT, read_record
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.resume import _log_other_settings
from tests.megatron_zpp.train.training_runs import (
    RELATIVE,
    field,
    log_of,
    loss_values,
    losses,
    run,
    with_json,
)
from tests.ranks import ranks
from zeropp import InputError

BATCH = "--micro-batch-size 2 --global-batch-size 16 "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
RESUMED = BATCH + NO_DROPOUT + "--train-iters 4 "


def test_losses_agree_at_every_stage_and_on_one_rank(tmp_path):
    flags = "--micro-batch-size 2 --global-batch-size 8 " + NO_DROPOUT + "--train-iters 6 "
    expected = loss_values(run(1, flags, tmp_path))
    assert len(expected) == 6 and expected[-1] < expected[0]
    for stage, num_ranks in enumerate((2, 4, 2, 4)):
        log = run(num_ranks, f"{flags} --zero-stage {stage}", tmp_path)
        assert loss_values(log) == pytest.approx(expected, rel=RELATIVE)


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


BEFORE = BATCH + "--lr-warmup-iters 2 --eval-iters 1 --num-workers 0 "


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The log of a run of four iterations, each saved, and the flags that go on from it."""
    folder = tmp_path_factory.mktemp("finished")
    own = f"{BEFORE} --train-iters 4 --swiglu --save {folder}/save --save-interval 1 "
    return run(1, own, folder), f"{BEFORE} --load {folder}/save "


# What goes on, how many iterations it takes, and what its log says, which that before does not.
GOES_ON = {
    "--swiglu --train-iters 6 --override-opt_param-scheduler --eval-interval 100": (
        2, ["validation loss at the end of training", "iteration        5/"],
    ),
    "--swiglu --train-iters 4 --finetune --lr 2e-3": (4, ["iteration        1/"]),
    "--swiglu --train-iters 4 --finetune --skip-train": (
        0, ["validation loss at the end of training"],
    ),
    "--swiglu --train-iters 4 --ckpt-step 2": (2, ["loaded checkpoint of iteration 2 from "]),
    "--swiglu --train-iters 4 --sample-prompt 1 --sample-length 5": (
        0, ["training is complete: 4 iterations are done", "Sample",
            "validation loss at the end of training"],
    ),
    "--swiglu --train-iters 4 --ckpt-step 2 --seed 7 --clip-grad 2 --global-batch-size 32 "
    "--override-opt_param-scheduler": (
        2, ["the global batch has 32 samples, but 16 in the checkpoint",
            "seed is 7 now, 1234 in the checkpoint: this changes which samples",
            "clip_grad is 2.0 now, 1.0 in the checkpoint: this changes the updates"],
    ),
    "--num-layers 7 --kv-channels 8 --normalization LayerNorm --num-attention-heads 4 --geglu "
    "--use-rope-scaling --use-checkpoint-args --train-iters 4 --ckpt-step 3": (
        1, ["--use-checkpoint-args: geglu is False, and --geglu has no effect",
            "--use-checkpoint-args: kv_channels is None, and --kv-channels 8 has no effect",
            "--use-checkpoint-args: num_layers is 2, and --num-layers 7 has no effect",
            "--use-checkpoint-args: swiglu is True",
            "use_rope_scaling is False, and --use-rope-scaling has no effect"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("flags", GOES_ON)
def test_what_goes_on_says_from_where_and_what_changed(flags, finished, tmp_path):
    before, loading = finished
    count, said = GOES_ON[flags]
    log = run(1, loading + flags, tmp_path)
    assert len(losses(log)) == count and all(words in log for words in said)
    assert "which samples come next" not in before
    assert log.count("--use-checkpoint-args: ") == 5 * ("use-checkpoint-args" in flags)
    if flags.endswith("--ckpt-step 2"):
        assert losses(log) == losses(before)[2:]
    if "--finetune" in flags and count:
        assert field(log, "consumed samples")[0] == "16"


def test_no_load_lr_state_starts_the_schedule_again(finished, tmp_path):
    first, loading = finished
    flags = "--swiglu --train-iters 6 --no-load-lr-state --lr-decay-style cosine"
    later = run(1, loading + flags, tmp_path)
    rates = field(later, "learning rate")
    assert rates[0] == field(first, "learning rate")[0] and len(losses(later)) == 2
    assert field(later, "consumed samples")[0] == "80"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--ckpt-step 7", "--ckpt-step 7: .* it has those of 1, 2, 3, 4"),
        ("--sample-prompt a\udcff", "--sample-prompt: .* is not UTF-8"),
    ],
)
@ranks(1, timeout=120)
def test_what_cannot_go_on_is_named(flags, expected, finished):
    with pytest.raises(InputError, match=expected):
        log_of(f"{finished[1]} --swiglu --train-iters 4 {flags}")


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
    configuration = json.loads(json.dumps(before.to_dict()))
    del configuration["tokenizer"]["tokenizer_hf_no_include_special_tokens"]
    state = TrainingState(
        iteration=2, consumed_samples=2, consumed_tokens=16, seed=1234, world_size=1, stage=0,
        tokenizer="", configuration=configuration,
    )  # fmt: skip
    caplog.set_level(logging.INFO, "megatron_zpp")
    _log_other_settings(SimpleNamespace(config=now, capabilities=()), state)
    said = ": this changes which samples come next"
    assert [line.removesuffix(said) for line in caplog.messages if said in line] == expected


def test_reset_iteration_keeps_the_loss_scale(tmp_path):
    flags = f"{BATCH} --fp16 --train-iters 2 --save {tmp_path} --load {tmp_path} "
    first = run(1, flags + "--initial-loss-scale 1024 --loss-scale-window 1", tmp_path)
    assert [float(scale) for scale in field(first, "loss scale")] == [1024, 2048]
    again = run(1, flags + "--reset-iteration", tmp_path)
    assert [float(scale) for scale in field(again, "loss scale")] == [4096, 4096]


FLAGS = "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr-decay-style constant "
FLAGS += with_json(
    {
        "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 1,
        "zero_quantized_gradients": True,
    },
    ranks_per_node=1,
)  # fmt: skip


@ranks(2, timeout=120)
def test_a_resumed_run_has_one_report_of_all_of_it(tmp_path: Path) -> None:
    curves = tmp_path / "curves"
    flags = f"{FLAGS} --tensorboard-dir {curves} --save {tmp_path}/save --load {tmp_path}/save "
    first = log_of(f"{flags} --exit-interval 2 --eval-iters 1 --eval-at-start")
    assert dist.get_rank() != 0 or f"  report             {curves}/report.html" in first
    assert dist.get_rank() != 0 or "2 of 4 iterations" in (curves / "report.html").read_text()
    second = log_of(f"{flags} --sample-prompt 7 --sample-length 3")
    if dist.get_rank() != 0:
        return
    assert f"  report             {curves}/report.html" in second
    record = read_record(curves)
    assert [point[0] for point in record.points("lm_loss")] == [1, 2, 3, 4]
    assert [point[0] for point in record.held_out_points()][0] == 0
    sent, forecast = record.mean_bytes(SENT), record.forecast_bytes()
    assert sent == forecast and sum(sent.values()) > 0  # each step gathers anew, nothing is coded
    assert list(record.mean_bytes(PLAIN)) == list(sent)
    assert all(sent[purpose] < plain for purpose, plain in record.mean_bytes(PLAIN).items())
    assert record.facts.sample in second.replace("\n  ", "\n")
    page = (curves / "report.html").read_text()
    assert "finished, 4 iterations" in page and "<svg" in page
    assert not any("Traceback" in log for log in (first, second))


@ranks(1, timeout=60)
def test_a_new_run_puts_the_report_of_the_earlier_one_aside(tmp_path: Path) -> None:
    flags = f"--micro-batch-size 1 --global-batch-size 2 --tensorboard-dir {tmp_path} "
    log_of(f"{flags} --train-iters 2")
    before = (tmp_path / "report.html").read_text()
    log_of(f"{flags} --train-iters 1 --log-interval 5")
    (earlier,) = tmp_path.glob("earlier-*")
    assert (earlier / "report.html").read_text() == before
    assert [read_record(earlier).iterations, (tmp_path / "report.html").exists()] == [2, False]
