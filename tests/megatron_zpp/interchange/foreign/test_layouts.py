"""Recorded checkpoints answer as their writers did; variants of their layouts, and the export."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_zpp.checkpoint.iteration_folders import IMPORTED_KINDS
from megatron_zpp.checkpoint.training_state import read_state
from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.foreign.import_checkpoint import READERS, import_checkpoint
from megatron_zpp.interchange.foreign.megatron_args import megatron_args, model_fields
from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.foreign.tensor_files import COMMON_STATE
from megatron_zpp.interchange.open_model import load_model
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.interchange.foreign.recorded_checkpoints import (
    answers_of,
    assert_same,
    change,
    next_losses,
    unpack,
    weights_of,
)
from tests.megatron_zpp.train.training_runs import log_of
from tests.ranks import ranks
from zeropp.errors import InputError
from zeropp.ranks.coordination import rank

OLD_NAMES = (
    ("self_attention.linear_qkv", "attention.query_key_value"),
    ("self_attention.linear_proj", "attention.dense"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    ("pre_mlp_layernorm", "post_attention_layernorm"),
)


def old_name(name: str) -> str:
    for new, old in OLD_NAMES:
        name = name.replace(new, old)
    return name


def as_old(model: dict[str, torch.Tensor]) -> dict:
    """The nested dicts and names of Megatron-LM before megatron-core."""
    parts: dict = {"embedding": {}, "encoder": {}}
    for name, tensor in model.items():
        part, _, rest = old_name(name).partition(".")
        if part == "embedding":
            module, _, kind = rest.partition(".")
            parts["embedding"][module] = {kind: tensor}
        elif part == "decoder":
            parts["encoder"][rest] = tensor
    copies = {}
    if "output_layer.weight" in model:
        copies = {"word_embeddings_for_head": {"weight": model["output_layer.weight"]}}
    return {"language_model": {key: part for key, part in parts.items() if part}, **copies}


def test_names_of_old_megatrons(tmp_path):
    source = unpack("megatron_legacy_gpt2", tmp_path)
    expected = weights_of(source, tmp_path / "new")
    for path in source.glob("iter_*/*/*.pt"):
        change(path, lambda content: content.update(model=as_old(content["model"])))
    assert_same(weights_of(source, tmp_path / "old"), expected)


def test_numbered_layers_of_a_pipeline_engine(tmp_path):
    source = unpack("deepspeed_universal_gpt2", tmp_path)
    expected = weights_of(source, tmp_path / "named")
    for path in (source / "global_step3_universal/zero").iterdir():
        name = old_name(path.name.removeprefix("language_model."))
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            path.rename(path.with_name(f"{int(number) + 2}.{rest}"))
        elif name.startswith("decoder.final_layernorm."):
            path.rename(path.with_name(f"4.{name.rpartition('.')[2]}"))
        elif name.startswith("embedding."):
            path.rename(path.with_name(f"tied_modules.embed.{name.removeprefix('embedding.')}"))
    assert_same(weights_of(source, tmp_path / "numbered"), expected)


def test_fp32_masters_of_16_bit_weights_are_taken(tmp_path):
    legacy = unpack("megatron_legacy_llama", tmp_path)
    expected = weights_of(legacy, tmp_path / "fp32")
    for path in legacy.glob("iter_*/*/*.pt"):
        content = torch.load(path, weights_only=False)
        tensors = {name: each for name, each in content["model"].items() if each is not None}
        vectors = [each for each in tensors.values() if each.ndim == 1]
        matrices = [each for each in tensors.values() if each.ndim > 1]
        content["model"] = {name: each.bfloat16() for name, each in tensors.items()}
        adam = content["optimizer"]
        content["optimizer"] = {"optimizer": adam, "fp32_from_fp16_params": [matrices, vectors]}
        torch.save(content, path)
    assert_same(weights_of(legacy, tmp_path / "masters"), expected)
    sharded = unpack("megatron_torch_dist_llama", tmp_path) / "iter_0000003"
    shards = ShardTensors(sharded)
    saved = {name: shards.whole(name).read() for name in shards.shapes()}
    weights = {name: each for name, each in saved.items() if not name.startswith("optimizer.")}
    saved |= {f"optimizer.state.fp32_param.{name}": each for name, each in weights.items()}
    saved |= {name: each.bfloat16() for name, each in weights.items()}
    for path in sharded.glob("__*"):
        path.unlink()
    dcp.save(saved, checkpoint_id=sharded, no_dist=True)
    assert_same(weights_of(sharded, tmp_path / "sharded"), expected)


def test_the_pointer_of_a_megatron_run_chooses_the_iteration(tmp_path):
    source = unpack("megatron_torch_dist_gpt2", tmp_path)
    shutil.copytree(source / "iter_0000003", source / "iter_0000009")
    assert import_checkpoint(source, tmp_path / "ours").iteration == 3
    (source / "iter_0000003").rename(source / "release")
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    imported = import_checkpoint(source, tmp_path / "release")
    assert imported.iteration == 3


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_an_export_has_megatrons_layout_and_comes_back(model, tmp_path):
    source = unpack(f"megatron_torch_dist_{model}", tmp_path)
    ours, export = tmp_path / "ours", tmp_path / "export"
    expected = weights_of(source, ours)
    assert main(["--load", str(ours), "--to-megatron", str(export)]) == 0
    assert_same(weights_of(export, tmp_path / "back"), expected)
    if model == "gpt2":  # the recorded llama has a tensor for each layer
        recorded = ShardTensors(source / "iter_0000003").shapes()
        recorded = {name: size for name, size in recorded.items() if "optimizer" not in name}
        assert ShardTensors(export / "release").shapes() == recorded
    assert (export / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_what_megatron_does_not_have_is_not_exported(tmp_path, capsys):
    model = replace(ModelConfig(), geglu=True, position_embedding_type="alibi")
    with pytest.raises(InputError, match="Megatron-LM has no --geglu True, --position-embedding-"):
        megatron_args(model, 128, "--to-megatron")
    source, ours = unpack("megatron_torch_dist_gpt2", tmp_path), tmp_path / "ours"
    import_checkpoint(source, ours)
    assert main(["--load", str(ours), "--to-megatron", str(source)]) == 1
    assert "exists already: name a new folder" in capsys.readouterr().err


def test_settings_under_the_names_of_newer_megatrons(tmp_path):
    source = unpack("megatron_core19_gpt2", tmp_path)
    args = vars(ShardTensors(source / "iter_0000003").pickled(COMMON_STATE)["args"])
    assert "apply_layernorm_1p" not in args  # so it has another name there
    assert not model_fields(args, "it")["apply_layernorm_1p"]
    assert model_fields(args | {"layernorm_zero_centered_gamma": True}, "it")["apply_layernorm_1p"]


@pytest.mark.parametrize(
    ("settings", "factor"),
    # As megatron-core: (0.1 mscale ln(scale) + 1) / (0.1 mscale_all_dim ln(scale) + 1).
    [({}, 0.1 * math.log(8) + 1), ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
     ({"mscale": 2.0, "mscale_all_dim": 0.0}, 0.2 * math.log(8) + 1)],
)  # fmt: skip
def test_yarn_multiplies_queries_and_keys_as_in_megatron(settings, factor):
    args = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 8.0}
    fields = model_fields({**args, **yarn, **settings}, "it")
    assert fields["yarn_attention_factor"] == pytest.approx(factor, rel=1e-12)
    model = ModelConfig(**fields, yarn_original_max_position_embeddings=40, yarn_beta_slow=2.0)
    back = model_fields(megatron_args(model, 128, "it"), "it")
    assert back["yarn_attention_factor"] == pytest.approx(factor, rel=1e-12)
    assert (back["yarn_original_max_position_embeddings"], back["yarn_beta_slow"]) == (40, 2.0)


@pytest.mark.parametrize("number", [None, 0, 1, [1]])
def test_arguments_of_dense_models_may_mention_experts(number):
    """As Megatron-DeepSpeed's do, whose number of experts is a list, and Megatron-LM's defaults."""
    args = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_experts": number}
    defaults = {"moe_layer_freq": 1, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0}
    model = ModelConfig(**model_fields({**args, **defaults}, "it"))
    model.check()
    assert not model.has_experts


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
