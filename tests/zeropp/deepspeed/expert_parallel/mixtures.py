"""Small mixtures of transformers, engines over them, and one process that they must equal."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import zeropp
from zeropp import Engine

VOCAB_SIZE, SAMPLES, LENGTH, CLIP, STEPS = 61, 16, 10, 0.5, 3
LR, EPS, DECAY = 1e-2, 1e-4, 0.01
ADAMW = {
    "type": "AdamW",
    "params": {"lr": LR, "eps": EPS, "weight_decay": DECAY, "torch_adam": True},
}
_SIZES = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,  # with a loss that balances experts
        "router_aux_loss_coef": 0.02,
        "tie_word_embeddings": False,
    }
)


def mixture(family: str, num_experts: int = 4) -> PreTrainedModel:
    """A model with the same random weights each time."""
    torch.manual_seed(7)
    if family == "mixtral":
        config = MixtralConfig(**_SIZES, intermediate_size=24, num_local_experts=num_experts)
        return MixtralForCausalLM(config)
    config = Qwen3MoeConfig(
        **_SIZES, intermediate_size=40, moe_intermediate_size=24, num_experts=num_experts
    )
    return Qwen3MoeForCausalLM(config)


def config_of(size: int, stage: int = 3, micro_batches: int = 1, **others: Any) -> dict:
    """A JSON with `size` ranks that split experts; `zero` are more keys of its ZeRO section."""
    zero = {"stage": stage, **others.pop("zero", {})}
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "zeropp": {"ranks_per_node": 2, **others.pop("zeropp", {})},
        "expert_parallel": {"enabled": size > 1, "autoep_size": size},
        "optimizer": ADAMW,
    } | others


def engine_of(model: nn.Module, size: int, **settings: Any) -> Engine:
    """An engine; settings are those of `config_of`."""
    return zeropp.initialize(model=model, config=config_of(size, **settings))[0]


def tokens_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB_SIZE, (SAMPLES, LENGTH), generator=generator)


def parts_of(step: int, micro_batches: int, world: int) -> list[list[torch.Tensor]]:
    """The tokens of a step's micro-batches on each rank."""
    ranks = tokens_of(step).chunk(world)
    return [list(tokens.chunk(micro_batches)) for tokens in ranks]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def run(engine: Engine, steps: int = STEPS, first: int = 0) -> list[tuple[float, float]]:
    """The mean losses of all ranks and the norms of the gradients of some steps."""
    micro_batches, results = engine.gradient_accumulation_steps(), []
    world = dist.get_world_size()
    for step in range(first, first + steps):
        total = torch.zeros((), dtype=torch.float64)
        for tokens in parts_of(step, micro_batches, world)[dist.get_rank()]:
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            total += loss.item() / micro_batches
        dist.all_reduce(total)
        norm = engine.get_global_grad_norm()
        results.append((total.item() / world, norm))
    return results


def run_alone(
    model: nn.Module, world: int, micro_batches: int = 1, steps: int = STEPS
) -> list[tuple[float, float]]:
    """What `run` returns, by one process in plain PyTorch, with the ranks' micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=DECAY)
    results = []
    for step in range(steps):
        batches = [each for rank in parts_of(step, micro_batches, world) for each in rank]
        total = 0.0
        for tokens in batches:
            loss = loss_of(model, tokens) / len(batches)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        results.append((total, norm))
        optimizer.step()
        optimizer.zero_grad()
    return results


@functools.cache
def expected(
    family: str, world: int, micro_batches: int, num_experts: int = 4
) -> tuple[list[tuple[float, float]], Mapping[str, torch.Tensor]]:
    """Losses and norms of one process, and its weights afterwards."""
    model = mixture(family, num_experts)
    return run_alone(model, world, micro_batches), model.state_dict()


def assert_close(actual: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Require losses and norms within a relative tolerance."""
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(wanted), rtol=tolerance, atol=0, check_dtype=False
    )
