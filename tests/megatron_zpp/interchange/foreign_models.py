"""Tiny models of transformers, and their folders, for several test files."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.data.text_source import resolve_tokenizer
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.settings.config import Config, ModelConfig, TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from tests.megatron_zpp.settings.tables import DATA
from tests.megatron_zpp.small_net import save_in

# Settings of models: those of a type, by `model_type`, and variants, whose names begin with a type.
TABLES = json.loads((DATA / "foreign_models.json").read_text())
TYPES, MODELS, MIXTURES, DENSE = (TABLES[key] for key in ("types", "models", "mixtures", "dense"))
SIZES, LLAMA3, SCALED_QUERIES = (TABLES["named"][k] for k in ("sizes", "llama3", "scaled_queries"))
ONE_FILE = "model.safetensors"
OTHER_NAMES = {"gemma3": "gemma3_text"}
ALL = MODELS | MIXTURES | DENSE
NUMBERS = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=97)
WORDS = "<|endoftext|> the cat sat on mat and a dog ran to it".split()


def tiny(name: str, **changes: object) -> PreTrainedModel:
    """Return a model of a type or of a variant of it, in eval mode; its sizes differ."""
    first = name.replace(",", " ").split()[0]
    model_type = OTHER_NAMES.get(first, first)
    settings = TYPES.get(model_type, SIZES) | ALL.get(name, {}) | changes
    # transformers' other kernels know no cap.
    how = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    config = AutoConfig.for_model(model_type, **deepcopy(settings))
    model = AutoModelForCausalLM.from_config(config, **how)
    return drawn(model, std=0.1 if first in MODELS else 0.2)


gpt2, llama, mistral, qwen2 = (partial(tiny, n) for n in ("gpt2", "llama", "mistral", "qwen2"))
qwen3, phi3, olmo3, smollm3 = (partial(tiny, n) for n in ("qwen3", "phi3", "olmo3", "smollm3"))
gemma2, gemma3, bloom, neox = (partial(tiny, n) for n in ("gemma2", "gemma3", "bloom", "gpt_neox"))
mixtral, olmoe = (partial(tiny, n) for n in ("mixtral", "olmoe"))
qwen2_moe, qwen3_moe = (partial(tiny, n) for n in ("qwen2_moe", "qwen3_moe"))
deepseek_v2, deepseek_v3 = (partial(tiny, n) for n in ("deepseek_v2", "deepseek_v3"))
granite_moe, glm4_moe = (partial(tiny, n) for n in ("granitemoe", "glm4_moe"))
minimax_m2, gpt_oss = (partial(tiny, n) for n in ("minimax_m2", "gpt_oss"))


def with_images(model_type: str) -> PreTrainedModel:
    """Return a model of texts and images whose language model is a Gemma 3 or a Ministral 3."""
    text = SIZES | {"head_dim": 10, "model_type": "gemma3_text", "sliding_window": 7}
    if model_type == "mistral3":
        text |= {"model_type": "ministral3", "rope_parameters": dict(SCALED_QUERIES)}
        text |= {"sliding_window": None}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, mm_tokens_per_image=4,
        image_token_index=96,
    )  # fmt: skip
    return drawn(AutoModelForImageTextToText.from_config(config))


def drawn(model: PreTrainedModel, std: float = 0.2) -> PreTrainedModel:
    """Draw every tensor of the model, biases and gains too; return it in eval mode."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, scale = (1.0, 0.1) if "norm" in name or "ln_" in name else (0.0, std)
            parameter.normal_(mean, scale, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # of the choice of experts
                buffer.normal_(0.0, 0.1, generator=generator)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path, shards: str = "5GB") -> Path:
    """Save the model in a folder; return the folder."""
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in a folder's safetensors files."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def change(folder: Path, drop: tuple[str, ...] = (), **put: Tensor) -> None:
    """Remove tensors from a folder with one file, and add others (with __ for each dot)."""
    tensors = load_file(folder / ONE_FILE)
    for name in drop:
        del tensors[name]
    new = {name.replace("__", "."): tensor for name, tensor in put.items()}
    save_file(tensors | new, folder / ONE_FILE, metadata={"format": "pt"})


def set_config(folder: Path, **entries: object) -> None:
    """Change entries of a folder's config.json; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | entries
    for key, value in entries.items():
        if value is None:
            del content[key]
    path.write_text(json.dumps(content))


def add_tokenizer(folder: Path, words: list[str] = WORDS, opens: bool = False) -> None:
    """Write a tokenizer of whole words, its settings and a chat template to a folder.

    With `opens` it puts the first word, the end of document, before each text.
    """
    model = models.WordLevel({word: number for number, word in enumerate(words)}, words[0])
    tokenizer = FastTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if opens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{words[0]} $A", special_tokens=[(words[0], 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def save_own(
    model: ModelConfig, save: Path, tokenizer_config: TokenizerConfig = NUMBERS
) -> tuple[Path, Tokenizer]:
    """Save a checkpoint of one of our models; return its folder and its tokenizer."""
    tokenizer = build_tokenizer(resolve_tokenizer(None, tokenizer_config))
    gpt = GPT(model, tokenizer.vocab_size)
    initialize(gpt, 5, model)
    state = TrainingState(
        iteration=3, consumed_samples=3, consumed_tokens=3, seed=1, world_size=1, stage=0,
        tokenizer=tokenizer.fingerprint, architecture=architecture(model, tokenizer.vocab_size),
        configuration=Config(model=model, tokenizer=tokenizer_config).to_dict(),
    )  # fmt: skip
    save_in(save, gpt, None, state)
    return save, tokenizer


def tokens() -> Tensor:
    """Return the same ids [2, 40] each time, which all these vocabularies have."""
    return torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(3))


def logits(model: torch.nn.Module) -> Tensor:
    """Return the logits of `tokens` by one of our models or of transformers' models."""
    with torch.no_grad():
        output = model(tokens())
    return output if isinstance(output, Tensor) else output.logits


def require_equal_step(ours: torch.nn.Module, theirs: PreTrainedModel) -> None:
    """Assert that logits, and the norm of all gradients of a step, are those of transformers."""
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-5)
    inputs, labels = tokens()[:, :-1], tokens()[:, 1:]
    ours(inputs, labels=labels).backward()
    output = theirs(inputs).logits
    torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten()).backward()
    norms = [
        float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])))
        for model in (ours, theirs)
    ]
    theirs.zero_grad()
    assert abs(norms[0] - norms[1]) < 1e-4 * norms[1] and norms[1] > 0.1
