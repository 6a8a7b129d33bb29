"""Checkpoints that Megatron-LM's core wrote become ours, with the same answers."""

from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.iteration_folders import IMPORTED_KINDS
from megatron_zpp.checkpoint.training_state import read_state
from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.foreign.import_checkpoint import READERS, import_checkpoint
from megatron_zpp.interchange.open_model import load_model
from tests.megatron_zpp.interchange.foreign.recorded_checkpoints import (
    answers_of,
    next_losses,
    unpack,
)
from tests.megatron_zpp.train.training_runs import log_of
from tests.ranks import ranks
from zeropp.ranks.coordination import rank

RECORDED = (
    "megatron_torch_dist_gpt2", "megatron_torch_dist_llama",
    "megatron_torch_dist_distributed_llama", "megatron_legacy_gpt2",
    "megatron_legacy_llama", "megatron_torch_dist_buckets_gpt2",
    "megatron_torch_dist_buckets_llama", "megatron_torch_dist_buckets_deep",
    "megatron_legacy_buckets_gpt2", "megatron_legacy_buckets_llama",
    "megatron_legacy_buckets_deep", "megatron_torch_dist_gathered_llama",
    "megatron_torch_dist_model_space_llama", "megatron_core19_gpt2",
    "megatron_core19_buckets_llama", "megatron_core19_reshardable_llama",
    "deepspeed_zero2_gpt2", "deepspeed_zero3_llama",
    "deepspeed_zero2_split",
    "deepspeed_universal_gpt2", "deepspeed_universal_bf16", "torchtitan_llama",
)  # fmt: skip
TITAN = ("--num-attention-heads", "4", "--rotary-base", "500000", "--seq-length", "16")
# fp32; logits are of order one and sums of at most 64 products, computed in another order.
LOGITS = LOSS = 1e-5


@pytest.fixture(params=RECORDED)
def imported(request, tmp_path):
    """Import a recorded checkpoint by the command."""
    source, save = unpack(request.param, tmp_path), tmp_path / "ours"
    flags = TITAN if request.param.startswith("torchtitan") else ()
    assert main(["--from-checkpoint", str(source), "--save", str(save), *flags]) == 0
    return request.param, save


def test_the_model_and_adam_answer_as_the_writer_did(imported):
    name, save = imported
    answers = answers_of(name)
    model, _ = load_model(save)
    with torch.no_grad():
        logits = model(answers.tokens[0, :, :-1])
    assert (logits - answers.logits).abs().max() < LOGITS
    losses = next_losses(save, answers)
    assert losses == pytest.approx(answers.losses, abs=LOSS)
    without = next_losses(save, answers, load_optimizer=False)
    assert abs(without[1] - losses[1]) > 100 * LOSS  # so Adam's state counts
    state = read_state(save / "iter_0000003")
    assert state.iteration == 3 and state.optimizer_saved


@ranks(2, timeout=120)
def continue_run(folder: Path) -> None:
    log = log_of(
        f"--load {folder} --use-checkpoint-args --vocab-size 96 --mock-data --train-iters 4 "
        "--global-batch-size 4 --micro-batch-size 2 --tensor-model-parallel-size 2"
    )
    if rank() == 0:
        assert " iteration        4/       4 | consumed samples:           16 |" in log


def test_a_run_goes_on_with_it(tmp_path):
    save = tmp_path / "ours"
    import_checkpoint(unpack("megatron_torch_dist_llama", tmp_path), save)
    continue_run(folder=save)


def test_what_errors_say_is_imported_is_imported():
    assert set(IMPORTED_KINDS) == set(READERS)
