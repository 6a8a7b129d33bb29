"""Training on ranks that share out the layers prints the numbers of one rank."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_zpp.commands.convert_hf import main as convert
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.loop import train
from tests.megatron_zpp.parallel.flags import (
    DEEP_GPT2,
    DEEP_LLAMA,
    LENGTH,
    PP2,
    PP4,
    SP,
    TP2,
    TP4,
    TWO_STAGES,
)
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

FP16 = "--fp16 --initial-loss-scale 65536 "
UNEVEN = "--decoder-first-pipeline-num-layers 1 "


@pytest.mark.parametrize(
    ("flags", "num_ranks", "how"),
    [
        (DEEP_GPT2, 2, PP2 + TWO_STAGES + "--zero-stage 1"),
        (DEEP_LLAMA, 2, PP2 + UNEVEN + "--recompute-granularity full"),
        (DEEP_GPT2, 4, PP4 + "--zero-stage 3"),
        (DEEP_GPT2, 4, PP2 + TWO_STAGES + "--zero-stage 3"),
        (DEEP_LLAMA, 4, PP2 + TP2 + SP),
        (DEEP_GPT2, 4, PP2 + TP2 + SP + "--cpu-optimizer --zero-stage 1"),
        (DEEP_LLAMA, 4, PP2 + "--context-parallel-size 2 --zero-stage 3"),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(flags, num_ranks, how, alone, tmp_path):
    require_equal(run(num_ranks, flags + how, tmp_path), alone(flags))


def test_in_16_bit_losses_are_close(alone, tmp_path):
    log = run(4, DEEP_GPT2 + PP2 + FP16 + "--zero-stage 3 --fp32-residual-connection", tmp_path)
    assert loss_values(log) == pytest.approx(loss_values(alone(DEEP_GPT2)), rel=1e-2)


@pytest.mark.parametrize("once", [True, False])
@ranks(4, timeout=120)
def test_with_all_of_zeropp_a_copy_serves_all_micro_batches(once, tmp_path):
    """A stage on ranks of two nodes of two: its data axis crosses them."""
    zero = {
        "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
        "zero_quantized_gradients": True,
    }  # fmt: skip
    path = tmp_path / f"{dist.get_rank()}.json"
    zeropp = {"ranks_per_node": 1, "reduce_gradients_once": once}
    if not once:
        zero["zero_hpz_partition_size"] = 1
    path.write_text(json.dumps({"zero_optimization": zero, "zeropp": zeropp}))
    expected = log_of(DEEP_GPT2 + PP2)
    log = log_of(f"{DEEP_GPT2} {PP2} --deepspeed_config {path}")
    if dist.get_rank() == 0:
        assert loss_values(log) == pytest.approx(loss_values(expected), rel=5e-3)
        assert "2 ranks share the layers, across nodes" in log
        crossed = re.findall(r"across nodes: (\S+) \|", log)  # or else "(formula: ...)" follows
        assert len(crossed) == 3 and all(float(sent) > 0 for sent in crossed)


@ranks(4, timeout=120)
def test_a_stop_in_the_middle_changes_no_digit(tmp_path):
    flags = f"{LENGTH} {PP2} {TP2} {SP} --num-layers 4 --bf16 --log-num-zeros-in-grad "
    require_same_digits_after_a_stop(flags, tmp_path, 2)


@ranks(4, timeout=180)
def test_steps_of_codes_go_on_under_a_pipeline_to_the_last_digit(tmp_path):
    """Each stage has ranks of two nodes; other stages begin with whole codes."""
    zero = {
        "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 4,
        "zero_quantized_gradients": True,
    }  # fmt: skip
    path = tmp_path / f"{dist.get_rank()}.json"
    zeropp = {"ranks_per_node": 1, "weight_steps": True, "code_messages": True}
    path.write_text(json.dumps({"zero_optimization": zero, "zeropp": zeropp}))
    flags = f"{DEEP_GPT2} --lr 1e-2 --deepspeed_config {path} "
    stages = PP2 + TWO_STAGES
    straight = losses(log_of(flags + stages))
    first = log_of(f"{flags} {stages} --save {tmp_path}/saved --exit-interval 2")
    second = log_of(f"{flags} {stages} --load {tmp_path}/saved")
    other = log_of(f"{flags} {PP2} --load {tmp_path}/saved")
    if dist.get_rank() == 0:
        assert losses(first) + losses(second) == straight
        line = "weight codes, which belong to other units than this run's: whole codes"
        assert line in other and line not in second


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(4, f"{DEEP_GPT2} {PP2} {TP2} {SP} --save {folder}/save --exit-interval 1", folder)
    return folder / "save"


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        (1, ""),
        (4, "--zero-stage 3"),
        (4, PP4),
        (4, TP4 + SP),
        (2, PP2 + TWO_STAGES),
    ],
)
def test_a_checkpoint_goes_on_at_other_sizes(num_ranks, how, saved, alone, tmp_path):
    log = run(num_ranks, f"{DEEP_GPT2} {how} --load {saved}", tmp_path)
    assert loss_values(log) == pytest.approx(loss_values(alone(DEEP_GPT2))[1:], rel=RELATIVE)


def test_the_exported_model_is_that_of_one_rank(saved, tmp_path):
    run(1, f"{DEEP_GPT2} --save {tmp_path}/alone --exit-interval 1", tmp_path)
    exported = []
    for folder in (saved, tmp_path / "alone"):
        target = tmp_path / "exported" / folder.name
        assert convert(["--load", str(folder), "--to-hf", str(target)]) == 0
        exported.append(load_file(target / "model.safetensors"))
    tensors, expected = exported
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=RELATIVE, atol=RELATIVE)


@ranks(4, timeout=120)
def test_the_first_weights_do_not_depend_on_the_stages(tmp_path):
    with built_run(DEEP_GPT2 + PP2 + TWO_STAGES + "--zero-stage 3") as pipeline:
        model = pipeline.trainer.sharding.model
        own = {name: weight.full_tensor() for name, weight in model.named_parameters()}
        everywhere = [None] * 4
        dist.all_gather_object(everywhere, own)
        assert model.num_parameters() == sum(
            weight.numel() for weight in {**everywhere[0], **everywhere[2]}.values()
        )
    with built_run(DEEP_GPT2) as whole:
        for name, weight in whole.trainer.sharding.model.named_parameters():
            holders = [rank for rank, weights in enumerate(everywhere) if name in weights]
            assert len(holders) == (4 if name == "tokens.weight" else 2), name
            for rank in holders:
                assert torch.equal(everywhere[rank][name], weight.full_tensor()), name


@ranks(2, timeout=120)
def test_dropout_differs_between_stages_and_repeats():
    flags = f"--num-layers 2 --train-iters 2 --global-batch-size 4 {PP2} --hidden-dropout 0.2 "
    first, again, other = log_of(flags), log_of(flags), log_of(flags + "--seed 1")
    if dist.get_rank() == 0:
        assert losses(first) == losses(again) != losses(other)


@pytest.mark.parametrize("how", [PP2 + TWO_STAGES, PP2 + TP2 + SP])
def test_a_sample_of_text_and_a_held_out_loss(how, alone, tmp_path):
    """The prompt has as many tokens as tensor ranks could share out; only losses are split."""
    flags = f"{DEEP_GPT2} --train-iters 2 --eval-iters 1 --sample-prompt 12 --sample-length 5 "
    expected, log = alone(flags), run(4, flags + how, tmp_path)
    texts, values = (
        [re.findall(pattern, each) for each in (log, expected)]
        for pattern in (r"Sample\n(.*)", r"loss at the end of training.* value: (\S+)")
    )
    assert texts[0] == texts[1] != []
    held_out, own = (list(map(float, each)) for each in values)
    assert held_out == pytest.approx(own, rel=RELATIVE) and own


@ranks(2, timeout=120)
def test_a_weight_of_a_later_stage_that_is_not_finite_is_named():
    flags = f"{DEEP_GPT2} {PP2} --log-optimizer-states-to-tensorboard "
    with built_run(flags) as pipeline:
        model = pipeline.trainer.sharding.model
        if dist.get_rank() == 1:
            local_part(model.blocks[3].norm1.weight.data)[0] = float("nan")
        pipeline.trainer.sharding.weights_changed()
        named = "the weight blocks.3.norm1.weight on rank 1; .*blocks.3.norm1 on rank 1 for samples"
        with pytest.raises(InputError, match=named):
            train(pipeline)


@ranks(4, timeout=120)
def test_few_micro_batches_are_warned_of():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron_zpp").addHandler(handler)
    with built_run(f"--num-layers 4 {PP4} --micro-batch-size 4 --global-batch-size 4"):
        pass
    if dist.get_rank() == 0:
        (line,) = (line for line in lines if "waits for others" in line)
        assert line.startswith("1 micro-batches on 4 pipeline ranks") and "in 75% of a step" in line


@pytest.mark.parametrize(
    ("num_ranks", "flags", "message"),
    [
        (3, PP2, "size 2 does not divide the 3 ranks: the nearest that does is"),
        (6, PP2 + TP2 + "--context-parallel-size 3", "size 3 times .* divide the 6 ranks"),
        (4, PP4, "--num-layers 2 over .* 4: there are more ranks than layers; .* fit are 2"),
        (2, PP2 + "--num-layers 5", "5 layers cannot be shared out .* 2 ranks; 1 fewer can. --dec"),
        (2, PP2 + UNEVEN + "--decoder-last-pipeline-num-layers 3", "ends have 4 layers"),
        (1, TWO_STAGES, "rank 2 divides the layers of a pipeline: give --pipeline-model-parallel"),
        (1, UNEVEN, "layers 1 divides the layers of a pipeline"),
        (2, PP2 + TWO_STAGES, "rank 2: the ranks of the pipeline have 1 layers"),
        (2, PP2 + TWO_STAGES + "--num-layers-per-virtual-pipeline-stage 1", "say the same in two"),
        (2, PP2 + "--num-layers-per-virtual-pipeline-stage 2", "stage 2: the ranks .* 1 layers"),
        (2, PP2 + TWO_STAGES + "--num-layers 4 --micro-batch-size 1 --global-batch-size 3",
         "3 micro-batches .* multiple of the 2 ranks of a pipeline, such as 4"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(num_ranks, flags, message):
    with pytest.raises(InputError, match=message):
        parse((TINY + "--mock-data " + flags).split(), num_ranks)


def test_the_layers_of_each_stage():
    def stages(flags: str) -> list[list[int]]:
        flags += " --num-layers 8 --global-batch-size 32"
        config = parse((TINY + "--mock-data " + flags).split(), 4)
        return list(map(list, config.parallel.stages(8)))

    assert stages("") == [list(range(8))]
    assert stages(PP2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stages(PP2 + TWO_STAGES) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert stages(PP2 + "--num-layers-per-virtual-pipeline-stage 2") == stages(PP2 + TWO_STAGES)
    assert stages(PP2 + "--decoder-first-pipeline-num-layers 3") == [[0, 1, 2], [3, 4, 5, 6, 7]]
    ends = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 "
    assert stages(PP4 + ends) == [[0], [1, 2], [3, 4], [5, 6, 7]]
