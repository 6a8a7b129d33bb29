"""Families of models that flags can say too: the same model, the same text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_zpp.interchange.conversion import export_model
from megatron_zpp.interchange.families.table import FAMILIES, why_unsupported
from megatron_zpp.interchange.hf_config import comparable, family_of, parse_config
from megatron_zpp.interchange.open_model import load_model, open_model
from megatron_zpp.settings.arguments import parse
from megatron_zpp.text.generate import Request, complete
from megatron_zpp.text.sampling import Sampling
from tests.megatron_zpp.interchange.family_flags import FLAGS, FLAGS_OF_MIXTURES
from tests.megatron_zpp.interchange.foreign_mixtures import MIXTURES
from tests.megatron_zpp.interchange.foreign_models import MODELS, logits, save_own, saved, tokens

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 97 "
NEW_TOKENS = 12
ALL_FLAGS, ALL_MODELS = FLAGS | FLAGS_OF_MIXTURES, MODELS | MIXTURES
GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("name", ALL_FLAGS)
def test_the_flags_of_a_family(name: str) -> None:
    config = parse_config(ALL_MODELS[name]().config.to_dict(), name)
    model = config.model
    sizes = (
        f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --num-attention-heads "
        f"{model.num_attention_heads} --ffn-hidden-size {model.ffn_size} --seq-length 48 "
    )
    ours = parse((DATA + sizes + ALL_FLAGS[name]).split(), 1).model
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
    eager = {"attn_implementation": "eager"} if name == "gemma2" else {}  # for its caps
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **eager).eval()
    ours, _ = load_model(tmp_path / "save")
    # As in test_convert_hf.py: rounding in a dozen operations on sums of size one.
    torch.testing.assert_close(logits(ours)[..., :97], logits(theirs), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ALL_FLAGS)
def test_greedy_text(name: str, tmp_path: Path) -> None:
    """Prompts of two lengths at once, with a cache, which transformers continues one by one."""
    theirs = ALL_MODELS[name]()
    ours, tokenizer = load_model(saved(theirs, tmp_path))
    prompts = [tokens()[0, :30], tokens()[1, :17]]
    requests = [
        Request(prompt=tuple(prompt.tolist()), max_new_tokens=NEW_TOKENS, sampling=GREEDY)
        for prompt in prompts
    ]
    for prompt, text in zip(prompts, complete(ours, tokenizer, requests), strict=True):
        expected = theirs.generate(
            prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=tokenizer.eod
        )[0, len(prompt) :].tolist()
        assert len(expected) > 5
        if expected[-1] == tokenizer.eod:
            expected.pop()
        assert text.strip() == tokenizer.decode(expected)


def test_no_type_is_both_supported_and_not() -> None:
    assert why_unsupported("bert") == "attention that is not causal"
    assert not [family.name for family in FAMILIES if why_unsupported(family.name)]
