"""Tiny models of transformers, and their folders, for several test files."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
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
ALTERNATING = ["sliding_attention", "full_attention"]
BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
}
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
    """Return a Mistral with a window of 7 tokens."""
    sizes = _llama_sizes(max_position_embeddings=48) | {"sliding_window": 7}
    return randomized(MistralForCausalLM(MistralConfig(**sizes | changes)))


def qwen2(**changes: object) -> PreTrainedModel:
    """Return a Qwen2: a bias of queries, keys and values only."""
    sizes = _llama_sizes(max_position_embeddings=48)
    return randomized(Qwen2ForCausalLM(Qwen2Config(**sizes | changes)))


def qwen3(**changes: object) -> PreTrainedModel:
    """Return a Qwen3: queries and keys are normalized; heads are wider than H / N."""
    sizes = _llama_sizes(max_position_embeddings=48) | {"head_dim": 10}
    return randomized(Qwen3ForCausalLM(Qwen3Config(**sizes | changes)))


def phi3(**changes: object) -> PreTrainedModel:
    """Return a Phi-3: queries, keys and values are one layer, and gate and input are."""
    sizes = _llama_sizes(max_position_embeddings=48) | {"pad_token_id": None}
    return randomized(Phi3ForCausalLM(Phi3Config(**sizes | changes)))


def longrope(original: int) -> dict[str, object]:
    """Return settings of a Phi-3 for texts longer than the `original` ones."""
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 500.0,
            "short_factor": [1.0, 1.1, 1.25], "long_factor": [1.5, 3.0, 7.0],
        },
    }  # fmt: skip


def olmo2(**changes: object) -> PreTrainedModel:
    """Return an OLMo 2: all heads of queries are normalized at once, and what branches return."""
    sizes = _llama_sizes(max_position_embeddings=48) | {"pad_token_id": None}
    return randomized(Olmo2ForCausalLM(Olmo2Config(**sizes | changes)))


def olmo3(**changes: object) -> PreTrainedModel:
    """Return an OLMo 3 of four blocks, of which the last has no window."""
    sizes = _llama_sizes(max_position_embeddings=48)
    more = {"num_hidden_layers": 4, "sliding_window": 7, "pad_token_id": None}
    return randomized(Olmo3ForCausalLM(Olmo3Config(**sizes | more | changes)))


def smollm3(**changes: object) -> PreTrainedModel:
    """Return a SmolLM3 of four blocks, of which every second has no rotary positions."""
    sizes = _llama_sizes(max_position_embeddings=48)
    more = {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": None}
    return randomized(SmolLM3ForCausalLM(SmolLM3Config(**sizes | more | changes)))


def gemma2(**changes: object) -> PreTrainedModel:
    """Return a Gemma 2 whose caps bend scores and logits, and whose first block has a window."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    config = Gemma2Config(**_gemma_sizes() | caps | changes)
    # transformers' other kernels know no cap.
    return randomized(Gemma2ForCausalLM._from_config(config, attn_implementation="eager"))


def gemma3(**changes: object) -> PreTrainedModel:
    """Return a Gemma 3 of four blocks; those with a window have another rotary base."""
    more = {"num_hidden_layers": 4, "layer_types": ALTERNATING * 2, "rope_parameters": BASES}
    return randomized(Gemma3ForCausalLM(Gemma3TextConfig(**_gemma_sizes() | more | changes)))


def bloom(**changes: object) -> PreTrainedModel:
    """Return a BLOOM of six heads, which is no power of two."""
    sizes = dict(vocab_size=97, hidden_size=36, n_layer=2, n_head=6, seq_length=48)
    ends = dict(bos_token_id=0, eos_token_id=0)
    return randomized(BloomForCausalLM(BloomConfig(**sizes | ends | changes)))


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
    "gpt2, ReLU, scores not divided": lambda: gpt2(
        activation_function="relu", scale_attn_weights=False
    ),
    "gpt2, fast GELU": lambda: gpt2(activation_function="gelu_fast"),
    "llama": llama,
    "llama, bias in attention, GeGLU, linear scaling by 2.5": lambda: llama(
        attention_bias=True, hidden_act="gelu",
        rope_parameters={"rope_type": "linear", "rope_theta": 500.5, "factor": 2.5},
    ),
    "llama, long factors": lambda: llama(
        rope_parameters={"original_max_position_embeddings": 16, "factor": 2.0}
        | longrope(16)["rope_parameters"],
    ),
    "llama, bias in the MLP, gated ReLU, other bounds of Llama 3.1's scaling": lambda: llama(
        mlp_bias=True, hidden_act="relu", head_dim=32, rope_parameters=LLAMA3 | {
            "low_freq_factor": 0.5, "high_freq_factor": 6.0,
            "original_max_position_embeddings": 40,
        },
    ),
    "llama, tied, biases, wide heads": lambda: llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=14,
        num_key_value_heads=6,
    ),
    "llama 3.1": lambda: llama(rope_parameters=LLAMA3, head_dim=32),
    "mistral": mistral,
    "mistral without a window": lambda: mistral(sliding_window=None),
    "qwen2": qwen2,
    "qwen2, tied": lambda: qwen2(tie_word_embeddings=True, num_key_value_heads=6),
    "qwen3": qwen3,
    "qwen3, tied": lambda: qwen3(tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2 with windows": lambda: qwen2(
        use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3, linear scaling": lambda: qwen3(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "qwen3, yarn": lambda: qwen3(
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                         "original_max_position_embeddings": 40},
    ),
    "qwen3, bias in attention, yarn with mscale, not rounded": lambda: qwen3(
        attention_bias=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.7,
                         "mscale_all_dim": 0.3, "truncate": False, "beta_fast": 3.0,
                         "original_max_position_embeddings": 40},
    ),
    "phi3": phi3,
    "phi3, a window, a part rotated, tied": lambda: phi3(
        sliding_window=7, tie_word_embeddings=True, num_key_value_heads=6,
        rope_parameters={"partial_rotary_factor": 0.75, "rope_theta": 100.0},
    ),
    "phi3, long factors": lambda: phi3(**longrope(16)),
    "phi3, short factors": lambda: phi3(**longrope(44)),
    "olmo2": olmo2,
    "olmo2, bias in attention, GeGLU": lambda: olmo2(
        attention_bias=True, hidden_act="gelu_pytorch_tanh"
    ),
    "olmo3": olmo3,
    "olmo3, yarn where there is no window": lambda: olmo3(
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 700.0, "factor": 8.0, "beta_fast": 9.0,
                "beta_slow": 0.5, "attention_factor": 1.2, "original_max_position_embeddings": 30,
            },
        },
    ),
    "smollm3": smollm3,
    "smollm3, tied": lambda: smollm3(
        tie_word_embeddings=True, no_rope_layers=[1, 0, 0, 1], use_sliding_window=True,
        sliding_window=6,
    ),
    "gemma2": gemma2,
    "gemma2 without caps": lambda: gemma2(
        attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=17
    ),
    "gemma3": gemma3,
    "gemma3, bias in attention": lambda: gemma3(attention_bias=True),
    "bloom": bloom,
    "bloom, residual behind the norm": lambda: bloom(
        apply_residual_connection_post_layernorm=True, n_head=4
    ),
    "gpt_neox": neox,
    "gpt_neox, bias in the MLP, ReLU, linear scaling": lambda: neox(
        attention_bias=False, hidden_act="relu",
        rope_parameters={"partial_rotary_factor": 1.0, "rope_theta": 500.0, "rope_type": "linear",
                         "factor": 1.5},
    ),
    "gpt_neox, parallel": lambda: neox(use_parallel_residual=True),
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


def _gemma_sizes() -> dict[str, object]:
    more = {
        "head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 7, "pad_token_id": None,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return _llama_sizes(max_position_embeddings=48) | more


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
