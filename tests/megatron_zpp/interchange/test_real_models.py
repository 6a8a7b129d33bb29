"""Real pretrained models, imported, compared with Hugging Face, and exported.

They are SmolLM2-135M, the 98 MB that `make smollm2` downloads, and Gemma 3 270M, the 253 MB of
`make gemma3`; without them tests are skipped.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatron_zpp.capabilities.lora.adapters import add_adapters, initialize_adapters
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.interchange.conversion import export_model, import_model
from megatron_zpp.interchange.open_model import OpenedModel, load_model, open_model
from megatron_zpp.model.delta import is_of_delta
from megatron_zpp.model.gpt import GPT
from tests.documents import ROOT
from tests.zeropp.lora_model import with_quantized_weights
from tools.fetch_model import MODELS

FILES = {name: ROOT / "runs" / "models" / model.name for name, model in MODELS.items()}
TEXT = ROOT / "LICENSE"
TOKENS, NEW_TOKENS = {"smollm2": 1024, "gemma3": 256}, 64
# Logits reach 44, and fp32 differs from fp64 by 8 to 13e-5, of Gemma by 3e-4. Both models compute
# in the same order, so usually no logit differs; but a library may multiply matrices of other
# shapes in another order.
CLOSE = {"smollm2": 1e-4, "gemma3": 3e-4}


@pytest.fixture(scope="module", params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def file(name: str) -> Path:
    return downloaded(name)


def downloaded(name: str) -> Path:
    """Return the file of a model; skips the test without it."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    if not FILES[name].exists():
        pytest.skip(f"make {name} fetches the model")
    return FILES[name]


@pytest.fixture(scope="module")
def theirs(file: Path) -> PreTrainedModel:
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def imported(file: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return import_model(file, tmp_path_factory.mktemp("real") / "save")


@pytest.fixture(scope="module")
def ours(imported: OpenedModel) -> Iterator[GPT]:
    model, _ = load_model(imported.path)
    with torch.no_grad():
        yield model


@pytest.fixture(scope="module")
def tokens(name: str, imported: OpenedModel) -> Tensor:
    ids = imported.tokenizer.encode(TEXT.read_text())
    return torch.tensor([ids[: TOKENS[name]]])


def test_logits_and_loss(name: str, ours: GPT, theirs: PreTrainedModel, tokens: Tensor) -> None:
    assert tokens.shape == (1, TOKENS[name])
    expected = theirs(tokens).logits
    assert expected.shape == (1, TOKENS[name], theirs.config.vocab_size)
    labels = tokens[:, 1:]
    loss = ours(tokens[:, :-1], labels=labels.contiguous())
    expected_loss = cross_entropy(expected[0, :-1].double(), labels[0])
    assert ours(tokens).sub_(expected).abs_().max() < CLOSE[name]
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)


def test_greedy_text(ours, theirs, imported, tokens):
    """Ours predicts each next token of the text that theirs generates, so it generates the same."""
    prompt = tokens[:, :40]
    text = theirs.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    assert text.shape == (1, 40 + NEW_TOKENS)
    assert ours(text)[:, 39:-1].argmax(-1).tolist() == text[:, 40:].tolist()
    assert imported.tokenizer.decode(text[0].tolist()).startswith(TEXT.read_text()[:60])


def test_export(name: str, imported: OpenedModel, theirs: PreTrainedModel, tmp_path: Path) -> None:
    export_model(imported, tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), theirs.state_dict()
    assert expected.keys() - tensors.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    text = TEXT.read_text()[:2000]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == imported.tokenizer.encode(text)
    assert tokenizer.chat_template or name == "gemma3"  # which is not tuned to chat
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_int8_weights_change_the_loss_by_less_than_half_a_percent() -> None:
    """Loss and gradients of the adapters on real text, with weights as four ranks store them."""
    opened = open_model(downloaded("smollm2"))
    lora = LoraConfig(lora_rank=8, pretrained_checkpoint="m")
    model = add_adapters(GPT(opened.config, opened.tokenizer.vocab_size), lora).eval()
    opened.fill(model)
    tokenizer = opened.tokenizer
    initialize_adapters(model, 1)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_of_delta(name) and not parameter.any():
                parameter.normal_(0, 0.01)  # with B = 0, A would have no gradient
    text = torch.tensor([tokenizer.encode(TEXT.read_text())[: 256 + 1]])
    loss, gradient = loss_and_gradient(model, text)
    int8_loss, int8_gradient = loss_and_gradient(with_quantized_weights(model, num_ranks=4), text)
    assert abs(int8_loss - loss) < 0.005 * loss
    assert torch.cosine_similarity(int8_gradient, gradient, dim=0) > 0.99


def loss_and_gradient(model: GPT, text: Tensor) -> tuple[float, Tensor]:
    with torch.enable_grad():  # the fixture `ours` disables it
        loss = model(text[:, :-1], text[:, 1:].contiguous())
    loss.backward()
    gradients = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad
    ]
    return loss.item(), torch.cat(gradients)
