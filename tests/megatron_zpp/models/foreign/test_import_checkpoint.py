"""Checkpoints that Megatron-LM's core wrote become ours, with the same answers."""

import pytest
import torch

from megatron_zpp.checkpoint.iteration_folders import IMPORTED_KINDS
from megatron_zpp.checkpoint.training_state import read_state
from megatron_zpp.commands.convert_hf import main
from megatron_zpp.models.foreign.import_checkpoint import READERS
from megatron_zpp.models.open_model import load_model
from tests.megatron_zpp.models.foreign.recorded_checkpoints import answers_of, next_losses, unpack

RECORDED = (
    "megatron_torch_dist_gpt2", "megatron_torch_dist_llama", "megatron_legacy_gpt2",
    "megatron_legacy_llama", "deepspeed_zero2_gpt2", "deepspeed_zero3_llama",
    "deepspeed_universal_gpt2", "torchtitan_llama",
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


def test_what_errors_say_is_imported_is_imported():
    assert set(IMPORTED_KINDS) == set(READERS)
