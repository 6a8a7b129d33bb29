"""Training on ranks that share each sequence prints the numbers of one rank."""

import pytest
import torch.distributed as dist

from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.parallel.flags import (
    CP2,
    CP4,
    GATHERED,
    GPT2,
    LENGTH,
    LLAMA,
    ONE_GROUP,
    SP,
    TP2,
)
from tests.megatron_zpp.train.training_runs import (
    RELATIVE,
    TINY,
    field,
    log_of,
    loss_values,
    losses,
    require_equal,
    require_same_digits_after_a_stop,
    run,
)
from tests.ranks import ranks
from zeropp import InputError


@pytest.mark.parametrize(
    ("flags", "num_ranks", "how"),
    [
        (GPT2, 2, CP2 + "--zero-stage 3"),
        (LLAMA + ONE_GROUP, 4, CP2 + TP2 + SP + "--zero-stage 0"),
        (LLAMA, 4, CP4 + "--zero-stage 1 --recompute-granularity full"),
        (LLAMA, 4, CP2 + GATHERED + "--zero-stage 2"),
        (GPT2, 4, CP4 + GATHERED + "--zero-stage 3"),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(flags, num_ranks, how, alone, tmp_path):
    """The Llama keeps documents apart, and has fewer key-value heads than ranks."""
    require_equal(run(num_ranks, flags + how, tmp_path), alone(flags))


def test_the_held_out_loss_and_a_sample(tmp_path):
    flags = f"{LLAMA} --train-iters 2 --eval-iters 1 --sample-prompt 1 --sample-length 5 "
    expected, log = run(1, flags, tmp_path), run(2, flags + CP2, tmp_path)
    for name in ("validation loss at the end of training", "Sample"):
        assert name in log and name in expected
    assert log.split("Sample")[1] == expected.split("Sample")[1]


@ranks(2, timeout=120)
def test_a_stop_in_the_middle_changes_no_digit(tmp_path):
    flags = f"{LENGTH} {CP2} --zero-stage 3 --bf16 "
    require_same_digits_after_a_stop(flags, tmp_path, 2)


def test_a_checkpoint_goes_on_with_whole_sequences(alone, tmp_path):
    folder = tmp_path / "save"
    run(2, f"{GPT2} {CP2} --save {folder} --exit-interval 2", tmp_path)
    log = run(1, f"{GPT2} --load {folder}", tmp_path)
    assert loss_values(log) == pytest.approx(loss_values(alone(GPT2))[2:], rel=RELATIVE)


@ranks(2, timeout=120)
def test_the_parts_of_a_sequence_drop_other_elements(tmp_path):
    flags = f"{LENGTH} --hidden-dropout 0.3 --attention-dropout 0.3 --train-iters 3 {CP2}"
    log = log_of(flags)
    assert losses(log_of(flags)) == losses(log)
    if dist.get_rank() == 0:
        assert len(set(field(log, "grad norm"))) == 3


@pytest.mark.parametrize(
    ("num_ranks", "flags", "message"),
    [
        (3, CP2, "--context-parallel-size 2 does not divide the 3 ranks: the nearest that does"),
        (2, CP2 + TP2, "size 2 times --context-parallel-size 2 does not divide the 2 ranks"),
        (2, CP2 + "--seq-length 15", "--seq-length 15 cannot be split over --context-.* is 16"),
        (8, "--context-parallel-size 8", "--num-attention-heads 4 cannot be split over"),
        (2, CP2 + GATHERED + "--seq-length 18", "18 cannot .* two parts each .* that can is 16"),
        (2, CP2 + "--cp-comm-type p2p", "--cp-comm-type p2p: not available: allgather sends"),
    ],
)
def test_sizes_that_do_not_fit(num_ranks: int, flags: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse((TINY + "--mock-data " + flags).split(), num_ranks)
