"""Families of models: as transformers computes them, as flags say them, and what is refused."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_zpp.interchange.conversion import export_model, import_model
from megatron_zpp.interchange.families.capabilities.experts import frequency_text
from megatron_zpp.interchange.families.table import FAMILIES, why_unsupported
from megatron_zpp.interchange.hf_config import comparable, family_of, parse_config
from megatron_zpp.interchange.open_model import family_of_opened, load_model, open_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.text.generate import Request, complete
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.tokenizer import Tokenizer
from tests.megatron_zpp.interchange.family_flags import FLAGS, FLAGS_OF_DENSE, FLAGS_OF_MIXTURES
from tests.megatron_zpp.interchange.foreign_models import (
    ALL,
    DENSE,
    ONE_FILE,
    change,
    logits,
    qwen2_moe,
    require_equal_step,
    save_own,
    saved,
    set_config,
    tensors_in,
    tiny,
    tokens,
    with_images,
)
from zeropp.errors import InputError

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 97 "
NEW_TOKENS = 12
ALL_FLAGS = FLAGS | FLAGS_OF_MIXTURES
GREEDY = Sampling(temperature=0.0)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@cache
def model_of(name: str) -> PreTrainedModel:
    return tiny(name)


@pytest.mark.parametrize("name", ALL_FLAGS | FLAGS_OF_DENSE)
def test_the_flags_of_a_family(name: str) -> None:
    config = parse_config(model_of(name).config.to_dict(), name)
    model = config.model
    sizes = (
        f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --num-attention-heads "
        f"{model.num_attention_heads} --ffn-hidden-size {model.ffn_size} --seq-length 48 "
    )
    ours = parse((DATA + sizes + (ALL_FLAGS | FLAGS_OF_DENSE)[name]).split(), 1).model
    assert comparable(ours) == comparable(model)
    assert family_of(ours).name == config.family.name


@pytest.mark.parametrize("name", ALL_FLAGS)
def test_a_model_of_our_own(name: str, tmp_path: Path) -> None:
    """The config.json that is written for it makes transformers compute the same."""
    sizes = "--num-layers 2 --hidden-size 36 --num-attention-heads 6 --seq-length 48 "
    drawn = "--init-method-std 0.3 --make-vocab-size-divisible-by 1 "  # logits of order one
    model = parse((DATA + sizes + drawn + ALL_FLAGS[name]).split(), 1).model
    save_own(model, tmp_path / "save")
    opened = open_model(tmp_path / "save")
    export_model(opened, tmp_path / "back")
    export_model(opened, tmp_path / "narrow", "bf16")
    assert AutoConfig.from_pretrained(tmp_path / "narrow").dtype == torch.bfloat16
    eager = {"attn_implementation": "eager"} if name == "gemma2" else {}  # for its caps
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **eager).eval()
    ours, _ = load_model(tmp_path / "save")
    # As in test_convert_hf.py: rounding in a dozen operations on sums of size one.
    torch.testing.assert_close(logits(ours)[..., :97], logits(theirs), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ALL)
def test_a_model_of_transformers(name: str, tmp_path: Path) -> None:
    """Logits, the norm of all gradients of a step, greedy text, and all tensors once more.

    Logits are of order one, and fp32 rounds each of some dozens of sums by 6e-8 of its terms.
    """
    theirs = model_of(name)
    source = saved(theirs, tmp_path / "source", shards="15KB")
    ours, tokenizer = load_model(source)
    assert tokenizer.vocab_size == ours.padded_vocab_size == theirs.config.vocab_size
    require_equal_step(ours, theirs)
    if name in ALL_FLAGS or name in DENSE:
        require_equal_text(ours, theirs, tokenizer)
    import_model(source, tmp_path / "save")
    imported, _ = load_model(tmp_path / "save")
    assert torch.equal(logits(imported), logits(ours))
    backs = {"back": tmp_path / "save"}
    if name in DENSE:
        backs["own"] = source  # with a config.json of our own
    for back, opened in backs.items():
        export_model(open_model(opened), tmp_path / back, max_bytes=20_000)
        for folder in (source, tmp_path / back):
            assert len(list(folder.glob("*.safetensors"))) > 2
        before, after = tensors_in(source), tensors_in(tmp_path / back)
        assert before.keys() == after.keys()
        for each, tensor in before.items():
            assert tensor.dtype == after[each].dtype and torch.equal(tensor, after[each]), each
        again = AutoModelForCausalLM.from_pretrained(tmp_path / back).eval()
        torch.testing.assert_close(logits(again), logits(theirs), rtol=0, atol=1e-5)
    config, written = (json.loads((tmp_path / each / "config.json").read_text())
                       for each in ("source", "back"))  # fmt: skip
    assert written == config


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_loss_curve(name: str, tmp_path: Path) -> None:
    """Ten AdamW steps from the same weights: every loss agrees to 1e-5 relative, and falls."""
    theirs = tiny(name)
    ours, _ = load_model(saved(theirs, tmp_path))
    assert ours.num_parameters() == sum(each.numel() for each in theirs.parameters())
    inputs, labels = tokens()[:, :-1], tokens()[:, 1:]
    curves = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curve = []
        for _ in range(10):
            if model is ours:
                loss = model(inputs, labels=labels)
            else:
                output = model(inputs).logits.flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(output, labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][-1] < curves[0][0] - 0.5


def test_tanh_gelu_is_not_exact_gelu(tmp_path: Path) -> None:
    """The comparison is precise enough to distinguish the two GELUs."""
    ours, _ = load_model(saved(tiny("gpt2"), tmp_path))
    with pytest.raises(AssertionError, match="not close"):
        require_equal_step(ours, tiny("gpt2", activation_function="gelu"))


@pytest.mark.parametrize(
    ("model_type", "part"), [("gemma3", "gemma3_text"), ("mistral3", "ministral3")]
)
def test_the_language_model_of_one_that_reads_images(model_type, part, tmp_path, caplog):
    """It is exported alone, whether the files have the old names of tensors or the new ones."""
    caplog.set_level("INFO", "megatron_zpp")
    theirs = with_images(model_type)
    source = saved(theirs, tmp_path / "source")
    opened = import_model(source, tmp_path / "save")
    assert "tensors that read images are left out" in caplog.text
    ours, _ = load_model(tmp_path / "save")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)
    export_model(opened, tmp_path / "back")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert alone.config.model_type == part
    assert torch.equal(logits(alone), logits(theirs))
    prefix = "language_model.model."
    before, after = tensors_in(source), tensors_in(tmp_path / "back")
    assert {name.replace("model.", prefix, 1) for name in after} == {
        name for name in before if name.startswith(prefix)
    }
    renamed = {name.replace(prefix, "model.language_model."): each for name, each in before.items()}
    save_file(renamed, source / ONE_FILE, metadata={"format": "pt"})
    again, _ = load_model(source)
    assert torch.equal(logits(again), logits(ours))
    set_config(source, text_config=[])
    with pytest.raises(InputError, match="text_config is \\[\\]; expected an object"):
        open_model(source)


def require_equal_text(ours: GPT, theirs: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Prompts of two lengths at once, with a cache; theirs agrees with each token of the texts."""
    prompts = [tokens()[0, :30].tolist(), tokens()[1, :17].tolist()]
    requests = [
        Request(prompt=tuple(prompt), max_new_tokens=NEW_TOKENS, sampling=GREEDY)
        for prompt in prompts
    ]
    texts = [tokenizer.encode(text) for text in complete(ours, tokenizer, requests)]
    assert sum(map(len, texts)) > 2
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            best = theirs(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 :].argmax(-1)
        ended = [tokenizer.eod] if len(text) < NEW_TOKENS else [best[-1]]
        assert best.tolist() == text + ended


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


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
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
    assert why_unsupported("bert") == "attention that is not causal"
    assert not [family.name for family in FAMILIES if why_unsupported(family.name)]
    without_window = tiny("cohere2").config.to_dict() | {"sliding_window": None}
    with pytest.raises(InputError, match="sliding_window is None; expected a number"):
        parse_config(without_window, "")


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


def test_settings_that_mean_the_same() -> None:
    """Old names and values of released files."""
    internlm3 = tiny("internlm3").config.to_dict() | {"architectures": ["InternLM3ForCausalLM"]}
    both = {"qkv_bias": True, "bias": True}
    assert not parse_config(internlm3 | both, "internlm3").model.disable_bias_linear
    gemma = tiny("gemma").config.to_dict()
    assert parse_config(gemma | {"hidden_act": "gelu"}, "gemma") == parse_config(gemma, "gemma")
    apertus = tiny("apertus").config.to_dict()
    del apertus["rope_parameters"]  # whose default is scaled
    assert parse_config(apertus, "apertus") == parse_config(tiny("apertus").config.to_dict(), "")
