"""What went wrong is named: rank, samples and tensors of a loss that is not finite or a spike."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.train.loop import LossWatch, train
from tests.megatron_zpp.train.training_runs import built_run, log_of, losses
from tests.ranks import ranks
from zeropp.errors import InputError
from zeropp.optim.step_or_skip import local_part

FLAGS = (
    "--train-iters 4 --micro-batch-size 1 --global-batch-size 4 --zero-stage 3 "
    "--hidden-dropout 0.1 --data-cache-path {tmp} "
)


class Poison(torch.autograd.Function):
    """The identity; in a chosen pass its output, or its gradient, is not finite."""

    @staticmethod
    def forward(ctx, x, forward: bool, backward: bool):
        ctx.backward_too = backward
        return x * float("inf") if forward else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan") if ctx.backward_too else gradient, None, None


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("forward", "the loss is nan at iteration 2, .* not finite: the output of blocks.1 on "
                    "rank 1 for samples 7:8"),
        ("backward", "the norm of the gradients is nan at iteration 2, .* not finite: the gradient "
                     "of the output of blocks.0 on rank 1 for samples 7:8"),
    ],
)  # fmt: skip
@ranks(2)
def test_the_first_tensor_that_is_not_finite_is_named(where, named, tmp_path):
    """The second micro-batch of rank 1 in iteration 2 of global batches of 4 is sample 7."""
    with built_run(FLAGS.format(tmp=tmp_path)) as run:
        is_forward = where == "forward"
        block = run.trainer.sharding.model.blocks[1 if where == "forward" else 0]
        bad_tokens = run.batches.datasets[0][7]["tokens"][:-1].tolist()
        is_bad = False

        def look(module, inputs, keywords):
            nonlocal is_bad
            tokens = inputs[0]
            is_bad = tokens[0].tolist() == bad_tokens

        def poison(module, inputs, output):
            return Poison.apply(output, is_bad and is_forward, is_bad and not is_forward)

        run.trainer.sharding.model.register_forward_pre_hook(look, with_kwargs=True)
        if where == "forward":
            block.register_forward_hook(poison)
        else:
            run.trainer.sharding.model.blocks[1].register_forward_pre_hook(
                lambda module, inputs: (poison(module, inputs, inputs[0]), *inputs[1:])
            )
        with pytest.raises(InputError, match=f"{named}.*--skip-samples 4:8") as error:
            train(run)
        assert "rank 0" not in str(error.value)


@ranks(2)
def test_a_weight_that_is_not_finite_is_named(tmp_path):
    with built_run(FLAGS.format(tmp=tmp_path)) as run, torch.no_grad():
        if dist.get_rank() == 1:
            local_part(run.trainer.sharding.model.norm.weight.data)[0] = float("nan")
        run.trainer.sharding.weights_changed()
        with (
            torch.enable_grad(),
            pytest.raises(InputError, match="the weight norm.weight on rank 1"),
        ):
            train(run)


@ranks(2)
def test_a_spike_names_samples_and_tensors_and_changes_no_digit(tmp_path):
    flags = FLAGS.format(tmp=tmp_path)
    expected = log_of(flags)
    means = iter([None, 1.0, None, None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossWatch, "mean_below", lambda self, loss: next(means))
        log = log_of(flags)
    if dist.get_rank() == 0:
        assert losses(log) == losses(expected)
        (line,) = (line for line in log.splitlines() if "far above" in line)
        assert line.startswith("iteration 2: the loss ") and "the mean of 1 before" in line
        assert "; --skip-samples 4:8 on resume" in line and "; largest gradients: " in line
        rank, sample = re.search(r"largest on rank (\d) for samples (\d):", line).groups()
        assert int(sample) in range(4, 8) and int(sample) % 2 == int(rank)
