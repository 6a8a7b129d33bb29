"""Training on ranks that split each matrix prints the numbers of one rank."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.model.loss import chunked_cross_entropy, parallel_cross_entropy
from megatron_zpp.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron_zpp.parallel.axes import TensorAxis
from megatron_zpp.recipe import model as recipe
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.inputs import TRAIN
from tests.megatron_zpp.parallel.flags import GPT2, LENGTH, LLAMA, ONE_GROUP, SP, TP2, TP4
from tests.megatron_zpp.train.training_runs import (
    RELATIVE,
    TINY,
    built_run,
    log_of,
    loss_values,
    losses,
    require_equal,
    require_same_digits_after_a_stop,
    run,
)
from tests.ranks import ranks
from zeropp import InputError
from zeropp.optim.step_or_skip import local_part
from zeropp.wire.rank_group import AXES, Nodes, RankGroup
from zeropp.wire.traffic import Traffic


@pytest.mark.parametrize(
    ("flags", "num_ranks", "how"),
    [
        (GPT2, 2, TP2 + "--zero-stage 0"),
        (GPT2, 4, TP2 + SP + "--zero-stage 3"),
        (LLAMA, 4, TP4 + SP),  # two ranks share a key
        (
            LLAMA + ONE_GROUP + "--qk-layernorm --add-qkv-bias ",
            4,
            TP2 + SP + "--zero-stage 3 --recompute-granularity full",
        ),
        (LLAMA, 2, TP2 + SP + "--zero-stage 3 --recompute-granularity full"),
        (LLAMA, 4, TP2 + "--zero-stage 1"),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(flags, num_ranks, how, alone, tmp_path):
    require_equal(run(num_ranks, flags + how, tmp_path), alone(flags))


@pytest.mark.parametrize("precision", ["--bf16 ", "--fp16 --initial-loss-scale 65536 "])
def test_in_16_bit_losses_are_close(precision, alone, tmp_path):
    log = run(4, GPT2 + TP2 + SP + precision, tmp_path)
    assert loss_values(log) == pytest.approx(loss_values(alone(GPT2)), rel=1e-2)


@ranks(4, timeout=120)
def test_with_all_of_zeropp_and_gradients_once_per_step(tmp_path):
    """Two nodes of the two ranks that split the model: each keeps its parts of the weights."""
    zero = {
        "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
        "zero_quantized_gradients": True,
    }  # fmt: skip
    zeropp = {"ranks_per_node": 2, "reduce_gradients_once": True}
    path = tmp_path / f"{dist.get_rank()}.json"
    path.write_text(json.dumps({"zero_optimization": zero, "zeropp": zeropp}))
    flags = f"{GPT2} {TP2} {SP} {ONE_GROUP} --global-batch-size 8 "
    expected = log_of(flags)
    log = log_of(f"{flags} --deepspeed_config {path}")
    if dist.get_rank() == 0:
        assert loss_values(log) == pytest.approx(loss_values(expected), rel=5e-3)
        assert "kept in each node" in log and "2 ranks share each matrix, in a node" in log
        crossed = re.findall(r"across nodes: (\S+) \|", log)  # or else "(formula: ...)" follows
        assert len(crossed) == 3 and all(float(sent) > 0 for sent in crossed)


@ranks(4, timeout=120)
def test_a_stop_in_the_middle_changes_no_digit(tmp_path):
    flags = f"{LENGTH} {TP2} {SP} {ONE_GROUP} --zero-stage 3 --bf16 "
    require_same_digits_after_a_stop(flags, tmp_path, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(4, f"{LLAMA} {TP2} {SP} --zero-stage 3 --save {folder}/save --exit-interval 1", folder)
    return folder / "save"


@pytest.mark.parametrize(
    ("num_ranks", "how"), [(1, ""), (2, "--zero-stage 3"), (4, TP4), (4, TP2 + "--zero-stage 1")]
)
def test_a_checkpoint_goes_on_at_other_sizes(num_ranks, how, saved, alone, tmp_path):
    log = run(num_ranks, f"{LLAMA} {how} --load {saved}", tmp_path)
    assert loss_values(log) == pytest.approx(loss_values(alone(LLAMA))[1:], rel=RELATIVE)


@ranks(2)
def test_the_first_weights_do_not_depend_on_the_ranks_that_split_them(tmp_path):
    """Each rank's part is that of the whole weights that one rank draws."""
    with built_run(GPT2 + TP2) as run_of_two:
        weights = {
            name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
            for name, weight in run_of_two.trainer.sharding.model.named_parameters()
        }
        block = run_of_two.trainer.sharding.model.blocks[0]
        assert block.mlp.input.weight.to_local().shape == (64, 32)
    with built_run(GPT2) as run_of_one:
        whole = run_of_one.trainer.sharding.model
        for name, weight in whole.named_parameters():
            assert torch.equal(weights[name], weight.full_tensor()), name


@pytest.mark.parametrize("how", [TP2, TP2 + SP])
@ranks(2, timeout=120)
def test_dropout_is_equal_where_the_ranks_share_and_different_where_they_split(how):
    """Whole weights stay the same on both ranks, and a run repeats."""
    flags = f"--train-iters 2 --global-batch-size 4 {how} --hidden-dropout 0.2 "
    flags += "--attention-dropout 0.2 "
    first, again, other = log_of(flags), log_of(flags), log_of(flags + "--seed 1")
    if dist.get_rank() == 0:  # who has the log
        assert losses(first) == losses(again) != losses(other)
    with built_run(flags) as run, run.batches.loader(TRAIN, 0) as batches:
        for _ in range(2):
            run.trainer.step(batches)
        model = run.trainer.sharding.model
        whole = [model.positions.weight, model.norm.weight, model.blocks[0].mlp.output.bias]
        everywhere = [None, None]
        dist.all_gather_object(everywhere, [weight.tolist() for weight in whole])
        assert everywhere[0] == everywhere[1]
        assert model.norm.weight.std() > 0


@pytest.mark.parametrize("how", [TP2 + SP, "--context-parallel-size 2 "])
@ranks(2, timeout=120)
def test_blocks_may_be_traced(how):
    """As `--compile` does, here without generating code."""
    flags = f"{GPT2} --train-iters 2 {how} "
    expected = log_of(flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "COMPILER", "eager")
        log = log_of(flags + "--compile")
    if dist.get_rank() == 0:
        require_equal(log, expected)
        assert "(formula: " not in log


def axis_of_two() -> TensorAxis:
    """The tensor axis of a test's two ranks."""
    group = RankGroup(
        members=(0, 1), position=dist.get_rank(), nodes=Nodes(num_ranks=2, ranks_per_node=2),
        purpose="tensor", ledger=Traffic(AXES), group=dist.group.WORLD,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (2,))
    return TensorAxis(group=group, sequence_parallel=True, mesh=mesh)


def own(whole: torch.Tensor, dim: int | None) -> torch.Tensor:
    """This rank's half of a tensor."""
    return whole if dim is None else whole.chunk(2, dim)[dist.get_rank()]


def filled(layer: nn.Module, source: nn.Module) -> nn.Module:
    """A layer with its parts of the parameters of a whole one."""
    values = dict(source.named_parameters())
    for name, parameter in layer.named_parameters():
        assert parameter.shape == values[name].shape
        local_part(parameter.data).copy_(own(values[name].data, layer.split_dims.get(name)))
    return layer


@pytest.mark.parametrize("splits_rows", [False, True])
@ranks(2)
def test_layers_that_are_split_compute_what_whole_ones_do(splits_rows):
    """Into channels and out of them again, forward and backward."""
    torch.manual_seed(0)
    axis, rows = axis_of_two(), 1 if splits_rows else None
    first, second = nn.Linear(6, 8), nn.Linear(8, 6)
    x = torch.randn(2, 4, 6, requires_grad=True)
    expected = second(first(x))
    expected.square().sum().backward()
    column = filled(ColumnParallelLinear(6, 8, True, axis), first)
    row = filled(RowParallelLinear(8, 6, True, axis), second)
    own_x = own(x.detach(), rows).clone().requires_grad_()
    y = row(column(axis.enter(own_x, splits_rows)), splits_rows)
    y.square().sum().backward()
    torch.testing.assert_close(y, own(expected, rows))
    torch.testing.assert_close(own_x.grad, own(x.grad, rows))
    torch.testing.assert_close(local_part(column.weight.grad), own(first.weight.grad, 0))
    torch.testing.assert_close(local_part(row.weight.grad), own(second.weight.grad, 1))


@ranks(2)
def test_a_vocabulary_that_is_split_is_looked_up_and_predicted_as_a_whole():
    torch.manual_seed(0)
    axis, tokens = axis_of_two(), torch.randint(10, (2, 5))
    table = nn.Embedding(10, 6)
    assert torch.equal(filled(VocabParallelEmbedding(10, 6, axis), table)(tokens), table(tokens))
    logits, labels, mask = torch.randn(7, 10), torch.randint(10, (7,)), torch.rand(7)
    part = own(logits, 1).clone()
    losses = parallel_cross_entropy(part, labels, mask, axis.group)
    torch.testing.assert_close(losses, chunked_cross_entropy(logits, labels, mask))
    torch.testing.assert_close(part, own(logits, 1))  # both are gradients now


@ranks(2)
def test_the_ranks_drop_other_elements():
    torch.manual_seed(3)
    with axis_of_two().own_random_numbers(torch.device("cpu")):
        own_numbers = torch.rand(4).tolist()
    shared = torch.rand(4).tolist()
    everywhere = [None, None]
    dist.all_gather_object(everywhere, (own_numbers, shared))
    (first, same), (second, same_again) = everywhere
    assert first != second and same == same_again != own_numbers


@ranks(2)
def test_a_tensor_axis_across_nodes_is_warned_of(tmp_path):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron_zpp").addHandler(handler)
    path = tmp_path / f"{dist.get_rank()}.json"
    path.write_text(json.dumps({"zeropp": {"ranks_per_node": 1}}))
    with built_run(f"{GPT2} {TP2} --deepspeed_config {path}"):
        pass
    crossing = [line for line in lines if "cross nodes" in line]
    assert len(crossing) == (dist.get_rank() == 0)


def test_a_sample_of_text_and_a_held_out_loss(tmp_path):
    flags = f"{GPT2} --train-iters 2 --eval-iters 1 --sample-prompt 1 --sample-length 5 "
    expected, log = run(1, flags, tmp_path), run(4, flags + TP2 + SP, tmp_path)
    for pattern in (r"loss at the end of training.* value: (\S+)", r"Sample\n(.*)"):
        assert re.findall(pattern, log) == re.findall(pattern, expected) != []


@pytest.mark.parametrize(
    ("num_ranks", "flags", "message"),
    [
        (3, TP2, "size 2 does not divide the 3 ranks: the nearest that does is 1"),
        (
            2,
            TP2 + "--num-attention-heads 6 --num-query-groups 3 --kv-channels 8",
            "--num-query-groups 3 cannot be split .*: .* is 4",
        ),
        (
            4,
            TP4 + "--num-query-groups 1 --kv-channels 7",
            "groups 1 below .*size 4: the 2 x 7 channels of keys and values .* --kv-channels",
        ),
        (
            4,
            TP4 + "--num-query-groups 2 --qk-layernorm --qk-layernorm-across-heads "
            "--normalization RMSNorm",
            "groups 2 below .*size 4: --qk-layernorm-across-heads needs a key of its own",
        ),
        (6, "--tensor-model-parallel-size 3", "--num-attention-heads 4 cannot .*: .* is 3"),
        (2, TP2 + "--ffn-hidden-size 77", "--ffn-hidden-size 77 cannot be split"),
        (2, TP2 + "--make-vocab-size-divisible-by 1", "divisible-by 1 cannot .* that can is 2"),
        (2, TP2 + SP + "--seq-length 17", "--seq-length 17 cannot be split"),
    ],
)
def test_sizes_that_do_not_fit(num_ranks, flags, message):
    with pytest.raises(InputError, match=message):
        parse((TINY + "--mock-data " + flags).split(), num_ranks)
