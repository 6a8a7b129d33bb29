"""Training on ranks that share tensors, sequences or layers prints the numbers of one rank."""

import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_zpp.commands.convert_hf import main as convert
from megatron_zpp.model.tensor_parallel import partial_parameters
from megatron_zpp.recipe import model as recipe
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.inputs import TRAIN
from megatron_zpp.train.loop import train
from tests.megatron_zpp.parallel.flags import (
    CP2,
    CP4,
    DEEP_GPT2,
    DEEP_LLAMA,
    GATHERED,
    GPT2,
    LLAMA,
    ONE_GROUP,
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
    with_json,
)
from tests.ranks import ranks
from zeropp import InputError
from zeropp.optim.step_or_skip import local_part

AGAIN = "--recompute-granularity full "
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss "
LATENT = (
    GPT2 + "--train-iters 2 --multi-latent-attention --qk-layernorm --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 8 --mscale-all-dim 0.7 --kv-lora-rank 8 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
)
QUERIES, BIASES = "--q-lora-rank 12 ", "--add-qkv-bias --add-attention-output-bias "
NORMED = LLAMA + ONE_GROUP + "--qk-layernorm --add-qkv-bias "
UNEVEN = "--decoder-first-pipeline-num-layers 1 "
FP16 = "--fp16 --initial-loss-scale 65536 "
ALL_THREE = {
    "stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "num_ranks", "how"),
    [
        (GPT2, 4, TP2 + SP + "--zero-stage 3"),
        (LLAMA, 4, TP4 + SP),  # two ranks share a key
        (NORMED, 4, TP2 + SP + "--zero-stage 3 " + AGAIN),
        (GPT2, 2, CP2 + "--zero-stage 3"),
        (LLAMA + ONE_GROUP, 4, CP2 + TP2 + SP + "--zero-stage 0"),
        (LLAMA, 4, CP4 + "--zero-stage 1 " + AGAIN),
        (LLAMA, 4, CP2 + GATHERED + "--zero-stage 2"),
        (GPT2, 4, CP4 + GATHERED + "--zero-stage 3"),
        (DEEP_GPT2, 2, PP2 + TWO_STAGES + "--zero-stage 1"),
        (DEEP_LLAMA, 2, PP2 + UNEVEN + AGAIN),
        (DEEP_GPT2, 4, PP4 + "--zero-stage 3"),
        (DEEP_GPT2, 4, PP2 + TWO_STAGES + "--zero-stage 3"),
        (DEEP_LLAMA, 4, PP2 + TP2 + SP),
        (DEEP_GPT2, 4, PP2 + TP2 + SP + "--cpu-optimizer --zero-stage 1"),
        (DEEP_LLAMA, 4, PP2 + CP2 + "--zero-stage 3"),
        (LATENT + QUERIES, 2, TP2 + "--zero-stage 1"),
        (LATENT, 2, TP2 + SP + AGAIN),
        (LATENT + QUERIES + BIASES + DOCUMENTS, 4, TP2 + SP + CP2 + "--zero-stage 3"),
        (LATENT + QUERIES + DOCUMENTS, 2, CP2 + GATHERED + "--recompute-granularity selective"),
        (LATENT + QUERIES, 2, PP2),
        (LATENT + DOCUMENTS, 4, "--zero-stage 3 " + CP2),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(flags, num_ranks, how, alone, tmp_path):
    """The Llama keeps documents apart, and has fewer key-value heads than ranks.

    The log line shows a formula only where another number of bytes was sent.
    """
    log = run(num_ranks, flags + how, tmp_path)
    require_equal(log, alone(flags))
    assert "(formula: " not in log


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        (GPT2, TP2 + SP + "--bf16 "),
        (GPT2, TP2 + SP + FP16),
        (DEEP_GPT2, PP2 + FP16 + "--zero-stage 3 --fp32-residual-connection"),
    ],
)
def test_in_16_bit_losses_are_close(flags, how, alone, tmp_path):
    log = run(4, flags + how, tmp_path)
    assert loss_values(log) == pytest.approx(loss_values(alone(flags)), rel=1e-2)


@pytest.mark.parametrize(
    ("flags", "partition", "per_node", "once", "said"),
    [
        (f"{GPT2} {TP2} {SP} {ONE_GROUP} --global-batch-size 8 ", 2, 2, True,
         ["kept in each node", "2 ranks share each matrix, in a node"]),
        (DEEP_GPT2 + PP2, 2, 1, True, ["2 ranks share the layers, across nodes"]),
        (DEEP_GPT2 + PP2, 1, 1, False, ["2 ranks share the layers, across nodes"]),
    ],
)  # fmt: skip
@ranks(4, timeout=120)
def test_with_all_of_zeropp(flags, partition, per_node, once, said):
    """The data axis of a part of the model crosses nodes."""
    zero = ALL_THREE | {"zero_hpz_partition_size": partition}
    zeropp = {"ranks_per_node": per_node, "reduce_gradients_once": once}
    expected, log = log_of(flags), log_of(flags + with_json(zero, **zeropp))
    if dist.get_rank() == 0:
        assert loss_values(log) == pytest.approx(loss_values(expected), rel=5e-3)
        assert all(words in log for words in said)
        crossed = re.findall(r"across nodes: (\S+) \|", log)  # or else "(formula: ...)" follows
        assert len(crossed) == 3 and all(float(sent) > 0 for sent in crossed)


def test_steps_of_codes_go_on_under_a_pipeline_to_the_last_digit(tmp_path):
    """Each stage has ranks of two nodes; other stages begin with whole codes."""
    zero = ALL_THREE | {"zero_hpz_partition_size": 4}
    zeropp = {"ranks_per_node": 1, "weight_steps": True, "code_messages": True}
    flags = f"{DEEP_GPT2} --lr 1e-2 {with_json(zero, **zeropp)} {PP2}"
    _, second = require_same_digits_after_a_stop(4, flags + TWO_STAGES, tmp_path)
    other = run(4, f"{flags} --load {tmp_path}/saved --ckpt-step 2", tmp_path)
    line = "weight codes, which belong to other units than this run's: whole codes"
    assert line in other and line not in second


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints after an iteration, by the flags of the model."""
    folders = {}
    for flags, num_ranks, how in (
        (LLAMA, 4, TP2 + SP + "--zero-stage 3 "), (GPT2, 2, CP2), (DEEP_GPT2, 4, PP2 + TP2 + SP),
    ):  # fmt: skip
        folder = tmp_path_factory.mktemp("saved")
        run(num_ranks, f"{flags} {how} --save {folder}/save --exit-interval 1", folder)
        folders[flags] = folder / "save"
    return folders


@pytest.mark.parametrize(
    ("flags", "num_ranks", "how"),
    [
        (LLAMA, 1, ""),
        (LLAMA, 4, TP4),
        (LLAMA, 4, TP2 + "--zero-stage 1"),
        (DEEP_GPT2, 1, ""),
        (DEEP_GPT2, 4, PP4),
        (DEEP_GPT2, 4, TP4 + SP),
        (DEEP_GPT2, 2, PP2 + TWO_STAGES),
    ],
)
def test_a_checkpoint_goes_on_at_other_sizes(flags, num_ranks, how, saved, alone, tmp_path):
    log = run(num_ranks, f"{flags} {how} --load {saved[flags]}", tmp_path)
    assert loss_values(log) == pytest.approx(loss_values(alone(flags))[1:], rel=RELATIVE)


def test_the_exported_model_is_that_of_one_rank(saved, tmp_path):
    run(1, f"{DEEP_GPT2} --save {tmp_path}/alone --exit-interval 1", tmp_path)
    exported = []
    for folder in (saved[DEEP_GPT2], tmp_path / "alone"):
        target = tmp_path / "exported" / folder.name
        assert convert(["--load", str(folder), "--to-hf", str(target)]) == 0
        exported.append(load_file(target / "model.safetensors"))
    tensors, expected = exported
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=RELATIVE, atol=RELATIVE)


@ranks(4, timeout=120)
def test_the_first_weights_depend_neither_on_stages_nor_on_tensor_ranks():
    """Each rank's part is that of the whole weights that one rank draws."""
    with built_run(DEEP_GPT2 + PP2 + TWO_STAGES + TP2) as split:
        model = split.trainer.sharding.model
        inputs = [each for name, each in model.named_parameters() if "mlp.input.weight" in name]
        assert {each.to_local().shape for each in inputs} == {(64, 32)}
        own = {
            name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
            for name, weight in model.named_parameters()
        }
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


@pytest.mark.parametrize("how", [TP2, TP2 + SP, CP2, PP2])
@ranks(2, timeout=120)
def test_dropout_repeats_and_is_equal_where_ranks_share(how):
    """Tensor ranks drop the same of what they share: whole weights stay the same on both."""
    flags = f"--train-iters 2 --global-batch-size 4 {how} --hidden-dropout 0.2 "
    flags += "--attention-dropout 0.2 "
    first, again, other = log_of(flags), log_of(flags), log_of(flags + "--seed 1")
    if dist.get_rank() == 0:  # who has the log
        assert losses(first) == losses(again) != losses(other)
    if TP2 not in how:
        return
    with built_run(flags) as built, built.batches.loader(TRAIN, 0) as batches:
        for _ in range(2):
            built.trainer.step(batches)
        model = built.trainer.sharding.model
        whole = [model.positions.weight, model.norm.weight, model.blocks[0].mlp.output.bias]
        everywhere = [None, None]
        dist.all_gather_object(everywhere, [weight.tolist() for weight in whole])
        assert everywhere[0] == everywhere[1]
        assert model.norm.weight.std() > 0


@pytest.mark.parametrize("how", [TP2 + SP, CP2])
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


@pytest.mark.parametrize(
    ("flags", "num_ranks", "how"),
    [
        (GPT2, 4, TP2 + SP),
        (LLAMA, 2, CP2),
        (DEEP_GPT2, 4, PP2 + TWO_STAGES),
        (DEEP_GPT2, 4, PP2 + TP2 + SP),
    ],
)
def test_a_sample_of_text_and_a_held_out_loss(flags, num_ranks, how, alone, tmp_path):
    """The prompt has as many tokens as tensor ranks could share out; only losses are split."""
    flags = f"{flags} --train-iters 2 --eval-iters 1 --sample-prompt 12 --sample-length 5 "
    expected, log = alone(flags), run(num_ranks, flags + how, tmp_path)
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"--num-layers 4 {PP4} --micro-batch-size 4 --global-batch-size 4",
         ["1 micro-batches on 4 pipeline ranks", "waits for others", "in 75% of a step"]),
        (f"{GPT2} {TP2}", ["cross nodes"]),
    ],
)  # fmt: skip
@ranks(4, timeout=120)
def test_what_is_slow_is_warned_of(flags, words):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron_zpp").addHandler(handler)
    with built_run(flags + with_json(ranks_per_node=1)):
        pass
    said = [line for line in lines if all(each in line for each in words)]
    assert len(said) == (dist.get_rank() == 0)


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


@pytest.mark.parametrize("how", [TP2, TP2 + SP])
def test_adapters_of_latent_attention(how: str, tmp_path: Path) -> None:
    """Also of the layers that each rank has whole."""
    run(1, LATENT + QUERIES + f"--save {tmp_path}/base --train-iters 1 ", tmp_path)
    flags = GPT2 + f"--lora-rank 2 --pretrained-checkpoint {tmp_path}/base --lr 0.1 "
    require_equal(run(2, flags + how, tmp_path), run(1, flags, tmp_path))


@ranks(2, timeout=120)
def test_all_ranks_have_the_same_whole_layers_of_latent_attention():
    with built_run(LATENT + QUERIES + TP2 + SP) as of_two:
        model = of_two.trainer.sharding.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        partial = {names[id(each)] for each in partial_parameters(model)}
        for layer in ("q_down", "kv_down", "q_down_norm", "kv_down_norm"):
            assert f"blocks.0.attention.{layer}.weight" in partial
        assert "blocks.0.attention.kv_up.weight" not in partial
        with of_two.batches.loader(TRAIN, 0) as batches:
            for _ in range(2):
                of_two.trainer.step(batches)
        whole = model.blocks[0].attention.kv_down.weight.detach()
        everywhere = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(everywhere, whole.contiguous())
        assert torch.equal(*everywhere)
