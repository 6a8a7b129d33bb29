"""A real pretrained model, SmolLM2-135M: in, compared with Hugging Face, and out again.

Needs the 98 MB that `make smollm2` fetches; skipped without them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.lora import add_lora, initialize_adapters, is_adapter
from megatron_zpp.models.convert import export_model, import_model
from megatron_zpp.models.open_model import OpenedModel, load_model
from megatron_zpp.settings.config import LoraConfig
from tests.documents import ROOT
from tests.zeropp.lora_model import with_quantized_weights
from tools.fetch_smollm2 import NAME

FILE = ROOT / "runs" / "models" / NAME
TEXT = ROOT / "LICENSE"
TOKENS, NEW_TOKENS = 1024, 64
# Logits reach 43, and fp32 itself is 8 to 13e-5 from fp64. What is computed in the same order
# rounds alike, and no logit differs; libraries may multiply matrices of other shapes otherwise.
CLOSE = 1e-4

pytestmark = pytest.mark.skipif(not FILE.exists(), reason="make smollm2 fetches the model")


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    where = {"pretrained_model_name_or_path": FILE.parent, "gguf_file": FILE.name}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def imported(theirs: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return import_model(FILE, tmp_path_factory.mktemp("smollm2") / "save")


@pytest.fixture(scope="module")
def ours(imported: OpenedModel) -> Iterator[GPT]:
    model, _ = load_model(imported.path)
    with torch.no_grad():
        yield model


@pytest.fixture(scope="module")
def tokens(imported: OpenedModel) -> Tensor:
    ids = imported.tokenizer.encode(TEXT.read_text())
    return torch.tensor([ids[:TOKENS]])


def test_logits(ours: GPT, theirs: PreTrainedModel, tokens: Tensor) -> None:
    assert tokens.shape == (1, TOKENS)
    found = ours(tokens).sub_(theirs(tokens).logits).abs_()
    assert found.shape == (1, TOKENS, 49152)
    assert found.max() < CLOSE


def test_greedy_text(
    ours: GPT, theirs: PreTrainedModel, imported: OpenedModel, tokens: Tensor
) -> None:
    """Ours, given their text, would write each next token of it: so it would write that text."""
    start = tokens[:, :40]
    text = theirs.generate(start, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    assert text.shape == (1, 40 + NEW_TOKENS)
    assert ours(text)[:, 39:-1].argmax(-1).tolist() == text[:, 40:].tolist()
    assert imported.tokenizer.decode(text[0].tolist()).startswith(TEXT.read_text()[:60])


def test_out_again(imported: OpenedModel, theirs: PreTrainedModel, tmp_path: Path) -> None:
    export_model(imported, tmp_path)
    tensors, wanted = load_file(tmp_path / "model.safetensors"), theirs.state_dict()
    assert wanted.keys() - tensors.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())
    text = TEXT.read_text()[:2000]
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == imported.tokenizer.encode(text)
    assert again.chat_template
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(t, wanted[name]) for name, t in loaded.state_dict().items())


def test_stored_as_int8_it_is_the_same_model_to_half_a_percent() -> None:
    """Loss and the adapters' gradients, with weights as four ranks store them, on real text."""
    model, tokenizer = load_model(FILE)
    add_lora(model, LoraConfig(lora_rank=8, pretrained_checkpoint="m"))
    initialize_adapters(model, 1)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if is_adapter(name) and not one.any():
                one.normal_(0, 0.01)  # or A has no gradient
    text = torch.tensor([tokenizer.encode(TEXT.read_text())[: 256 + 1]])
    exact, stored = (
        loss_and_gradient(one, text) for one in (model, with_quantized_weights(model, num_ranks=4))
    )
    assert abs(stored[0] - exact[0]) < 0.005 * exact[0]
    assert torch.cosine_similarity(stored[1], exact[1], dim=0) > 0.99


def loss_and_gradient(model: GPT, text: Tensor) -> tuple[float, Tensor]:
    with torch.enable_grad():  # the fixtures of other tests have switched it off
        loss = model(text[:, :-1], text[:, 1:].contiguous())
    loss.backward()
    trained = [one.grad.flatten() for one in model.parameters() if one.requires_grad]
    return loss.item(), torch.cat(trained)
