"""Mixtures of experts: gradients of transformers, the router's bias, further layers, bad files."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_zpp.interchange.conversion import export_model, import_model
from megatron_zpp.interchange.families.experts import frequency_text
from megatron_zpp.interchange.families.table import FAMILIES, why_unsupported
from megatron_zpp.interchange.hf_config import parse_config
from megatron_zpp.interchange.open_model import family_of_opened, load_model, open_model
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.interchange.foreign_mixtures import (
    MIXTURES,
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    granite_moe,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from tests.megatron_zpp.interchange.foreign_models import (
    ONE_FILE,
    change,
    logits,
    require_equal_step,
    saved,
    set_config,
    tensors_in,
)
from zeropp.errors import InputError

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@cache
def model_of(name: str) -> PreTrainedModel:
    return MIXTURES[name]()


@pytest.mark.parametrize("name", MIXTURES)
def test_one_step_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Logits, and the norm of all gradients of a step.

    Logits are of order one, and fp32 rounds each of some dozens of sums by 6e-8 of its terms.
    """
    theirs = model_of(name)
    ours, _ = load_model(saved(theirs, tmp_path))
    require_equal_step(ours, theirs)


def test_the_bias_of_a_router_stays_in_fp32(tmp_path: Path) -> None:
    """In a 16-bit file as in an export to 16 bit: its steps are too small for those."""
    source = saved(model_of("deepseek_v3"), tmp_path / "source")
    tensors = load_file(source / ONE_FILE)
    narrow = {name: t if name == BIAS else t.bfloat16() for name, t in tensors.items()}
    save_file(narrow, source / ONE_FILE, metadata={"format": "pt"})
    import_model(source, tmp_path / "save")
    for dtype in (None, "bf16"):
        export_model(open_model(tmp_path / "save"), tmp_path / str(dtype), dtype)
        after = tensors_in(tmp_path / str(dtype))
        config = json.loads((tmp_path / str(dtype) / "config.json").read_text())
        assert config["dtype"] == "bfloat16"  # of all others
        assert after.keys() == narrow.keys()
        for name, tensor in narrow.items():
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    model, _ = load_model(tmp_path / "save", dtype=torch.bfloat16)
    bias = model.blocks[1].mlp.router.expert_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, narrow[BIAS])


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "megatron_zpp")
    source = saved(model_of("deepseek_v3"), tmp_path / "source")
    further = {"model__layers__2__eh_proj__weight": torch.ones(36, 72),
               "model__layers__2__mlp__gate__weight": torch.ones(8, 36)}  # fmt: skip
    change(source, **further)
    with pytest.raises(InputError, match="extra: model.layers.2.eh_proj.weight"):
        open_model(source)  # of which config.json knows nothing
    set_config(source, num_nextn_predict_layers=1)
    import_model(source, tmp_path / "save")
    assert "2 tensors of layers that predict further tokens (MTP) are left out" in caplog.text
    ours, _ = load_model(tmp_path / "save")
    torch.testing.assert_close(logits(ours), logits(model_of("deepseek_v3")), rtol=0, atol=1e-5)
    export_model(open_model(tmp_path / "save"), tmp_path / "back")
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    assert after == before | {"num_nextn_predict_layers": 0}


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its file has another name for the type, and keys of DeepSeek's own code."""
    source = saved(model_of("deepseek_v3"), tmp_path / "source")
    set_config(
        source, model_type="kimi_k2", topk_method="noaux_tc", scoring_func="sigmoid",
        moe_layer_freq=1, auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    )  # fmt: skip
    import_model(source, tmp_path / "save")
    opened = open_model(tmp_path / "save")
    assert family_of_opened(opened).name == "kimi_k2"
    ours, _ = load_model(tmp_path / "save")
    torch.testing.assert_close(logits(ours), logits(model_of("deepseek_v3")), rtol=0, atol=1e-5)
    export_model(opened, tmp_path / "back")
    before, after = (path / "config.json" for path in (source, tmp_path / "back"))
    assert json.loads(after.read_text()) == json.loads(before.read_text())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rotary_dim": 8}, None),
        ({"rotary_dim": "half"}, "rotary_dim is 'half', of head_dim 8; expected numbers"),
        ({"rotary_dim": 12}, "partial_rotary_factor is 1.5; only a share above 0 and up to 1"),
        ({"rotary_dim": 12, "partial_rotary_factor": 0.5}, None),
    ],
)
def test_how_many_channels_are_rotated(entries, message, tmp_path: Path) -> None:
    """Released models have `rotary_dim`; transformers writes a share of the head, which counts."""
    source = saved(model_of("minimax_m2"), tmp_path)
    set_config(source, rope_parameters=None, rope_theta=500.0, **entries)
    if message is not None:
        with pytest.raises(InputError, match=message):
            open_model(source)
        return
    theirs = AutoModelForCausalLM.from_pretrained(source).eval()
    torch.testing.assert_close(logits(load_model(source)[0]), logits(theirs), rtol=0, atol=1e-5)


def test_gpt_oss_without_a_word_about_its_positions(tmp_path: Path) -> None:
    """Frequencies are then those of YaRN, by transformers' defaults."""
    source = saved(model_of("gpt_oss"), tmp_path)
    set_config(source, rope_parameters=None)
    theirs = AutoModelForCausalLM.from_pretrained(source).eval()
    assert theirs.config.rope_parameters["factor"] == 32
    torch.testing.assert_close(logits(load_model(source)[0]), logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "entries", "message"),
    [
        (deepseek_v2, {"topk_method": "noaux_tc"}, "'noaux_tc'; expected greedy or group_limited"),
        (deepseek_v3, {"topk_method": "greedy"}, "topk_method is 'greedy'; expected noaux_tc"),
        (deepseek_v3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected \"sigmo"),
        (deepseek_v3, {"norm_topk_prob": False}, "norm_topk_prob is False; expected true"),
        (deepseek_v2, {"norm_topk_prob": True}, "norm_topk_prob is True; expected false"),
        (deepseek_v3, {"rope_interleave": False}, "rope_interleave is False; expected true"),
        (deepseek_v2, {"mlp_bias": True}, "mlp_bias is True; expected false"),
        (deepseek_v3, {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        (deepseek_v3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; expected a"),
        (deepseek_v3, {"first_k_dense_replace": 2}, "no layer of the 2 has experts"),
        (deepseek_v3, {"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers is 'one'"),
        (deepseek_v3, {"num_key_value_heads": 2}, "contradict: every head has keys"),
        (deepseek_v3, {"n_group": 3}, "--num-experts 8 is not divisible by --moe-router-num-group"),
        (deepseek_v3, {"num_experts_per_tok": 5}, "is more than the 4 experts of --moe-router-gr"),
        (deepseek_v2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' are not sup"),
        (olmoe, {"clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported; only null is"),
        (mixtral, {"num_local_experts": 0}, "num_local_experts is 0; expected a whole number"),
        (mixtral, {"num_experts_per_tok": 5}, "--moe-router-topk 5 is more than --num-experts 4"),
        (mixtral, {"num_local_experts": 10**6}, "cannot be those of the 1,000,000 experts"),
        (qwen3_moe, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected a whole num"),
        (qwen3_moe, {"mlp_only_layers": 1}, "mlp_only_layers is 1; expected a list"),
        (qwen3_moe, {"mlp_only_layers": [0, 1]}, "no layer of the 2 has experts"),
        (granite_moe, {"attention_multiplier": 0}, "attention_multiplier is 0; expected a number"),
        (granite_moe, {"num_local_experts": 3}, r"shape \[4, 80, 36\], expected \[3, 80, 36\]"),
        (glm4_moe, {"norm_topk_prob": False}, "norm_topk_prob is False; expected true"),
        (glm4_moe, {"n_group": 5, "topk_group": 2}, "--num-experts 8 is not divisible by --moe-r"),
        (gpt_oss, {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; expected 1.702"),
        (gpt_oss, {"swiglu_limit": 0.0}, "--activation-func-clamp-value 0: expected"),
        (gpt_oss, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected \"silu\""),
        (gpt_oss, {"layer_types": ["chunked"] * 2}, "layer_types is .'chunked'"),
        (gpt_oss, {"quantization_config": {"quant_method": "fp8"}}, r"weights \(fp8\) are not"),
        (gpt_oss, {"quantization_config": "mxfp4"}, r"quantized weights \(unknown\) are not"),
        (mixtral, {"quantization_config": {"quant_method": "fp8"}}, r"weights \(fp8\) are not"),
    ],
)  # fmt: skip
def test_settings_that_are_not_supported(make, entries, message, tmp_path: Path) -> None:
    source = saved(make(), tmp_path)
    set_config(source, **entries)
    with pytest.raises(InputError, match=message):
        open_model(source)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """Experts that are missing, in one tensor beside single ones, of another width, or NaN."""
    expert = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    source = saved(model_of("qwen3_moe"), tmp_path)
    tensors = load_file(source / ONE_FILE)
    drop = tuple(expert.format(3, name) for name in ("gate", "up"))
    change(source, drop, model__layers__0__mlp__experts__gate_up_proj=torch.ones(4, 48, 36))
    with pytest.raises(InputError) as failure:
        open_model(source)
    text = str(failure.value)
    for name in drop:
        assert f"missing: {name}" in text
    assert "extra: model.layers.0.mlp.experts.gate_up_proj" in text
    narrow = {expert.format(2, "down"): torch.ones(36, 23)}
    save_file(tensors | narrow, source / ONE_FILE)
    with pytest.raises(InputError, match=r"2.down_proj.weight has shape \[36, 23\], expected"):
        open_model(source)
    broken = {expert.format(2, "down"): torch.full((36, 24), torch.nan)}
    save_file(tensors | broken, source / ONE_FILE)
    with pytest.raises(InputError, match="experts.2.down_proj.weight holds NaN"):
        load_model(source)


def test_layers_with_experts() -> None:
    for marks in ([True] * 3, [False] + [True] * 3, [True, False] * 3, [True] * 3 + [False]):
        text = frequency_text(marks)
        model = ModelConfig(num_layers=len(marks), num_experts=2, moe_layer_freq=text)
        assert list(model.moe_layers) == marks
    content = qwen2_moe(decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[1]).config
    assert parse_config(content.to_dict(), "").model.moe_layers == (False, False, False, True)


def test_what_is_not_supported_says_why() -> None:
    assert why_unsupported("qwen3_next").startswith("Gated DeltaNet, a linear attention")
    assert why_unsupported("phimoe").startswith("a choice of experts by sparsemixer")
    assert why_unsupported("dbrx") == "a mixture of experts of another kind"
    assert not [family.name for family in FAMILIES if why_unsupported(family.name)]
