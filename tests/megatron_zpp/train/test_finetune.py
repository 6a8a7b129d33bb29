"""Fine-tuning a Hugging Face model, with LoRA adapters beside frozen weights."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint.pretrained_model import with_initial_model
from megatron_zpp.commands.pretrain import main
from megatron_zpp.data.text_source import resolve_vocab_size
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.planner.activations import LiveBytes
from megatron_zpp.planner.run_forecast import RunForecast
from megatron_zpp.settings.arguments import parse
from tests.launched import ROOT
from tests.megatron_zpp.interchange.foreign_models import llama
from tests.megatron_zpp.train.finetuning import MIXZ, flags_for, folder_of
from tests.megatron_zpp.train.training_runs import (
    TINY,
    built_run,
    log_of,
    loss_values,
    require_equal,
    require_same_digits_after_a_stop,
    run,
    with_json,
)
from tests.ranks import ranks
from zeropp import InputError
from zeropp.wire.rank_group import Nodes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a tiny Llama and of examples for it."""
    even = llama(vocab_size=104, num_key_value_heads=6)  # what two and four ranks can split
    return flags_for(even, tmp_path_factory.mktemp("llama"))


def of_node(zero: dict, **more: object) -> str:
    return with_json(zero, ranks_per_node=2, more=more)


@pytest.mark.parametrize("sizes", ["", "--tensor-model-parallel-size 2 --sequence-parallel "])
@ranks(4, timeout=180)
def test_adapters_learn_beside_weights_stored_as_codes(base, sizes):
    flags = base + sizes
    log, exact = log_of(flags + of_node(MIXZ)), log_of(flags + "--zero-stage 3 --train-iters 1 ")
    if dist.get_rank() == 0:
        assert "frozen weights are stored and gathered as INT8 (MixZ++)" in log
        assert "parameters are trained" in log
        quantized, expected = loss_values(log), loss_values(exact)
        assert quantized[0] == pytest.approx(expected[0], rel=0.005)  # what INT8 may move a loss by
        assert quantized[-1] < 0.8 * quantized[0]


def test_resuming_changes_no_digit_and_reads_the_frozen_weights_again(base, tmp_path):
    require_same_digits_after_a_stop(2, f"{base} {of_node(MIXZ)} --train-iters 4 ", tmp_path)


def test_a_dry_run_says_what_is_trained_and_what_is_stored(base, capsys):
    config = ROOT / "examples" / "ds_mixz_config.json"
    flags = f"{base} --seq-length 16 --dry-run --dry-run-ranks 4 --deepspeed_config {config}"
    assert main(flags.split()) == 0
    output = capsys.readouterr().out
    assert "frozen weights are stored and gathered as INT8" in output and "are trained" in output
    assert "secondary copies (hpZ)" in output and "fits" in output


@pytest.mark.parametrize("zero", [MIXZ, {"stage": 2}], ids=["MixZ++", "whole"])
@ranks(2, timeout=180)
def test_a_dry_run_forecasts_the_memory(base, zero, tmp_path):
    """To a tenth, as the document says: all tensors of the job, its samples too."""
    larger = base.replace("--micro-batch-size 1 --global-batch-size 4", "--micro-batch-size 8")
    flags = larger + of_node(zero, bf16={"enabled": True}, train_batch_size=32)
    flags += "--train-iters 2 "
    config, _ = with_initial_model(parse((TINY + flags).split(), 2), open_model)
    vocab_size = resolve_vocab_size(config.data, config.tokenizer)
    nodes = Nodes(num_ranks=2, ranks_per_node=2)
    foretold = RunForecast.of(config, vocab_size, nodes, is_cpu=True)
    with LiveBytes() as live:
        log_of(flags)
    assert foretold.host_bytes == pytest.approx(live.peak, rel=0.1)


@ranks(1)
def test_resumed_adapters_keep_their_scaling_and_base(base, tmp_path):
    flags = base + of_node(MIXZ | {"zero_hpz_partition_size": 1})
    log_of(f"{flags} --save {tmp_path}/save --lora-alpha 8 --train-iters 1")
    again = f"{flags} --load {tmp_path}/save "
    with pytest.raises(InputError, match="--lora-alpha 16: the adapters in .* trained with 8"):
        log_of(again)
    folder = folder_of(base)
    shutil.copytree(folder, tmp_path / "other")
    assert "fit no other weights" not in log_of(f"{again} --lora-alpha 8")
    moved = again.replace(f"-checkpoint {folder}", f"-checkpoint {tmp_path}/other")
    assert f"not {tmp_path}/other: they fit no other weights" in log_of(f"{moved} --lora-alpha 8")


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The log of one rank."""
    return run(1, f"{base} --clip-grad 0.1 ", tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "how",
    [
        "--tensor-model-parallel-size 2 ",
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 ",
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type allgather "
        "--cpu-optimizer --zero-stage 1 ",
    ],
)
def test_adapters_learn_the_same_at_other_sizes(base, how, alone, tmp_path):
    log = run(4, f"{base} --clip-grad 0.1 {how}", tmp_path)
    require_equal(log, alone)
    assert "(formula: " not in log


@ranks(2, timeout=120)
def test_what_backward_does_not_reach_sends_nothing(base):
    late = f"{base} --lora-target-modules blocks.1.mlp.input "
    for how in (
        "--tensor-model-parallel-size 2 --recompute-granularity full ",
        "--context-parallel-size 2 --cp-comm-type allgather ",
    ):
        assert "(formula: " not in log_of(late + how)  # of bytes, where it is not what was counted
    with pytest.raises(InputError, match="nothing to train in layers 0 to 0, stage 0 of the"):
        log_of(late + "--pipeline-model-parallel-size 2 ")


@pytest.mark.parametrize("stored", [MIXZ, {"stage": 3}], ids=["MixZ++", "whole"])
@ranks(2, timeout=180)
def test_a_saved_run_opens_with_its_adapters_merged(base, stored, tmp_path):
    """Also where the base is itself tuned."""
    folder = folder_of(base)
    flags = base + of_node(stored) + "--train-iters 2 "
    log_of(f"{flags} --save {tmp_path}/first")
    again = flags.replace(f"-checkpoint {folder}", f"-checkpoint {tmp_path}/first")
    log_of(f"{again} --save {tmp_path}/second")
    start, first = open_model(folder), open_model(tmp_path / "first")
    second = open_model(tmp_path / "second")
    assert first.base == Path(folder) and second.base == first.path
    assert first.path == (tmp_path / "first" / "iter_0000002").resolve()
    for before, after in ((start, first), (first, second)):
        for name, tensor in before.tensors():
            merged = after.weights.read(name)
            moved = (merged - tensor).abs().max().item()
            assert (moved > 1e-3) == (name.removesuffix(".weight") in after.added.layers), name
    # The first loss, with the same adapters beside and merged.
    beside = loss_values(log_of(f"{flags} --load {tmp_path}/first --finetune --train-iters 1"))
    merged = loss_values(log_of(f"{again} --train-iters 1"))
    if dist.get_rank() == 0:
        close = 0.005 if stored == MIXZ else 1e-5  # what INT8 may move a loss by; rounding
        assert merged == pytest.approx(beside, rel=close)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--save {folder}", "is the folder of --pretrained-checkpoint"),
        ("--seq-length 4096", "is more than the .* positions"),
        ("--lora-target-modules attn", "names no linear layer"),
    ],
)
@ranks(1)
def test_bad_input(base, change, named):
    folder = folder_of(base)
    flags = f"{base} {change.format(folder=folder)}"
    with pytest.raises(InputError, match=named), built_run(flags):
        pass


@ranks(2, timeout=120)
def test_all_weights_may_be_trained_too(base):
    log = log_of(base.replace("--lora-rank 4", "--zero-stage 2"))
    if dist.get_rank() == 0:
        assert "LoRA" not in log and loss_values(log)[-1] < loss_values(log)[0]
