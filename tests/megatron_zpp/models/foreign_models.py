"""Tiny models of transformers, and their folders, for several test files."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.training_state import TrainingState, architecture, run_settings
from megatron_zpp.data.text_source import resolve_tokenizer
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.settings.config import Config, ModelConfig, TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer

ONE_FILE = "model.safetensors"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
NUMBERS = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=97)
WORDS = "<|endoftext|> the cat sat on mat and a dog ran to it".split()


def gpt2(**changes: object) -> PreTrainedModel:
    """Return a GPT-2 of two blocks, in eval mode; its sizes differ from each other."""
    sizes = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=48, n_inner=80)
    ends = dict(bos_token_id=0, eos_token_id=0)
    return randomized(GPT2LMHeadModel(GPT2Config(**sizes | ends | changes)))


def llama(**changes: object) -> PreTrainedModel:
    """Return a Llama of two blocks with two key-value heads for six query heads."""
    sizes = _llama_sizes(max_position_embeddings=48)
    return randomized(LlamaForCausalLM(LlamaConfig(**sizes | changes)))


def mistral(**changes: object) -> PreTrainedModel:
    """Return a Mistral without a window."""
    sizes = _llama_sizes(max_position_embeddings=48) | {"sliding_window": None}
    return randomized(MistralForCausalLM(MistralConfig(**sizes | changes)))


def neox(**changes: object) -> PreTrainedModel:
    """Return a GPT-NeoX with the MLP after the attention, and all channels rotated."""
    sizes = dict(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=80, max_position_embeddings=48, use_parallel_residual=False,
        rope_parameters={"partial_rotary_factor": 1.0, "rope_theta": 500.0}, eos_token_id=0,
    )  # fmt: skip
    return randomized(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes | changes)))


MODELS = {
    "gpt2": gpt2,
    "gpt2, untied, exact GELU": lambda: gpt2(
        tie_word_embeddings=False, activation_function="gelu", n_inner=None
    ),
    "llama": llama,
    "llama, tied, biases, wide heads": lambda: llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=14,
        num_key_value_heads=6,
    ),
    "llama 3.1": lambda: llama(rope_parameters=LLAMA3, head_dim=32),
    "mistral": mistral,
    "gpt_neox": neox,
    "gpt_neox, tied, a quarter rotated": lambda: neox(
        tie_word_embeddings=True, hidden_act="gelu_new",
        rope_parameters={"partial_rotary_factor": 0.25, "rope_theta": 100.0},
    ),
}  # fmt: skip


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Draw every tensor of the model, biases and gains too; return it in eval mode."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.1,
                              generator=generator)  # fmt: skip
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
        configuration=run_settings(Config(model=model, tokenizer=tokenizer_config)),
    )  # fmt: skip
    checkpoint.save(save, gpt, None, state)
    return save, tokenizer


def _llama_sizes(**more: int) -> dict[str, object]:
    return dict(
        vocab_size=101, hidden_size=36, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, intermediate_size=40, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False, **more,
    )  # fmt: skip


def tokens() -> Tensor:
    """Return the same ids [2, 40] each time, which all these vocabularies have."""
    return torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(3))


def logits(model: torch.nn.Module) -> Tensor:
    """Return the logits of `tokens` by one of our models or of transformers' models."""
    with torch.no_grad():
        output = model(tokens())
    return output if isinstance(output, Tensor) else output.logits
