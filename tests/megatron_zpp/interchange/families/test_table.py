"""Families of models that flags can say too: the same model, the same text."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_zpp.interchange.conversion import export_model, import_model
from megatron_zpp.interchange.families.table import FAMILIES, why_unsupported
from megatron_zpp.interchange.hf_config import comparable, family_of, parse_config
from megatron_zpp.interchange.open_model import load_model, open_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.arguments import parse
from megatron_zpp.text.generate import Request, complete
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.tokenizer import Tokenizer
from tests.megatron_zpp.interchange.family_flags import (
    FLAGS,
    FLAGS_OF_DENSE,
    FLAGS_OF_MIXTURES,
)
from tests.megatron_zpp.interchange.foreign_dense import (
    DENSE,
    SCALED_QUERIES,
    dense,
    with_images,
)
from tests.megatron_zpp.interchange.foreign_mixtures import MIXTURES
from tests.megatron_zpp.interchange.foreign_models import (
    MODELS,
    ONE_FILE,
    logits,
    require_equal_step,
    save_own,
    saved,
    set_config,
    tensors_in,
    tokens,
)
from zeropp.errors import InputError

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 97 "
NEW_TOKENS = 12
OF_DENSE = {name: partial(dense, name) for name in DENSE}
ALL_FLAGS, ALL_MODELS = FLAGS | FLAGS_OF_MIXTURES, MODELS | MIXTURES | OF_DENSE
GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("name", ALL_FLAGS | FLAGS_OF_DENSE)
def test_the_flags_of_a_family(name: str) -> None:
    config = parse_config(ALL_MODELS[name]().config.to_dict(), name)
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


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_of_transformers(name: str, tmp_path: Path) -> None:
    """Logits, the norm of all gradients of a step, greedy text, and all tensors once more.

    Logits are of order one, and fp32 rounds each of some dozens of sums by 6e-8 of its terms.
    """
    theirs = dense(name)
    source = saved(theirs, tmp_path / "source")
    ours, tokenizer = load_model(source)
    require_equal_step(ours, theirs)
    require_equal_text(ours, theirs, tokenizer)
    export_model(open_model(source), tmp_path / "back")  # with a config.json of our own
    before, after = tensors_in(source), tensors_in(tmp_path / "back")
    assert before.keys() == after.keys()
    for tensor_name, tensor in before.items():
        assert torch.equal(tensor, after[tensor_name]), tensor_name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(again), logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "part"), [("gemma3", "gemma3_text"), ("mistral3", "ministral3")]
)
def test_the_language_model_of_one_that_reads_images(
    model_type: str, part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize("name", ALL_FLAGS)
def test_greedy_text(name: str, tmp_path: Path) -> None:
    theirs = ALL_MODELS[name]()
    ours, tokenizer = load_model(saved(theirs, tmp_path))
    require_equal_text(ours, theirs, tokenizer)


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


def test_no_type_is_both_supported_and_not() -> None:
    assert why_unsupported("bert") == "attention that is not causal"
    assert not [family.name for family in FAMILIES if why_unsupported(family.name)]


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        (
            "internlm3",
            {"qkv_bias": True, "bias": False},
            "qkv_bias is True and bias is False; only",
        ),
        ("helium", {"head_dim": 10}, "6 heads of 10 channels do not make hidden_size 36"),
        ("cohere2", {"sliding_window": None}, "sliding_window is None; expected a number"),
        ("cohere", {"logit_scale": 0}, "logit_scale is 0; expected a number above 0"),
        ("cohere", {"use_qk_norm": "yes"}, "use_qk_norm is 'yes'; expected true or false"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported; only null is"),
        ("gemma", {"hidden_act": "xielu"}, "hidden_act is 'xielu'; expected"),
        ("falcon", {"alibi": True}, "alibi is True; expected false"),
        ("falcon", {"multi_query": 1}, "multi_query is 1; expected true or false"),
        (
            "falcon",
            {"num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn is 2; expected null or",
        ),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "supported are yarn"),
        (
            "ministral3",
            {"rope_parameters": SCALED_QUERIES | {"llama_4_scaling_beta": "x"}},
            "llama_4_scaling_beta is 'x'; expected a number above 0",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 9.0}, "head_dim": None},
            "alpha of the rotary positions is 9.0 and head_dim None; expected",
        ),
        (
            "glm",
            {"partial_rotary_factor": 0, "rope_parameters": None},
            "partial_rotary_factor is 0",
        ),
    ],
)
def test_settings_of_dense_families_we_do_not_have(name: str, entries: dict, message: str) -> None:
    content = dense(name).config.to_dict() | {"architectures": None} | entries
    with pytest.raises(InputError, match=message):
        parse_config(content, name)


def test_settings_that_mean_the_same() -> None:
    """Old names and values of released files."""
    internlm3 = dense("internlm3").config.to_dict() | {"architectures": ["InternLM3ForCausalLM"]}
    both = {"qkv_bias": True, "bias": True}
    assert not parse_config(internlm3 | both, "internlm3").model.disable_bias_linear
    gemma = dense("gemma").config.to_dict()
    assert parse_config(gemma | {"hidden_act": "gelu"}, "gemma") == parse_config(gemma, "gemma")
    apertus = dense("apertus").config.to_dict()
    del apertus["rope_parameters"]  # whose default is scaled
    assert parse_config(apertus, "apertus") == parse_config(dense("apertus").config.to_dict(), "")
