"""Train an actor and a critic on what the actor writes, as step 3 of DeepSpeed-Chat does.

zeropp --num_ranks 4 --ranks_per_node 2 examples/deepspeed/rlhf.py --deepspeed --output_dir out

The actor has adapters, and its frozen weights are quantized (MixZ++). A fixed score stands for the
reward model: how many tokens of an answer are even.
"""

import argparse
import os

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from zeropp import deepspeed
from zeropp.deepspeed.accelerator import get_accelerator
from zeropp.deepspeed.compression.helper import recursive_getattr, recursive_setattr
from zeropp.deepspeed.ops.adam import FusedAdam
from zeropp.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

WORDS, PROMPT, ANSWER, RANK = 64, 4, 8, 4
SIZES = dict(
    vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


class Adapted(nn.Module):
    """A frozen linear layer and a product of two small matrices that are trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        rows, columns = getattr(layer.weight, "ds_shape", layer.weight.shape)
        self.lora_right = nn.Parameter(torch.randn(columns, RANK) / columns**0.5)
        self.lora_left = nn.Parameter(torch.zeros(RANK, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + x @ self.lora_right @ self.lora_left


class Critic(nn.Module):
    """Says after each token what the answer's score will be."""

    def __init__(self) -> None:
        super().__init__()
        self.body = LlamaModel(LlamaConfig(**SIZES))
        self.head = nn.Linear(SIZES["hidden_size"], 1, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.values(tokens).mean()

    def values(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens).last_hidden_state).squeeze(-1)


def not_available(*parameters: nn.Parameter) -> list[nn.Parameter]:
    """Return the parameters that must be gathered before they are read."""
    absent = ZeroParamStatus.NOT_AVAILABLE
    return [each for each in parameters if hasattr(each, "ds_id") and each.ds_status == absent]


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return those of the tokens of the answers."""
    chosen = tokens[:, 1:].unsqueeze(-1)
    return logits[:, :-1].float().log_softmax(-1).gather(-1, chosen).squeeze(-1)[:, PROMPT - 1 :]


def save(engine: nn.Module, path: str) -> None:
    """Write the weights, with adapters added to what they adapt, from the first rank."""
    for module in engine.modules():
        if isinstance(module, Adapted):
            held = not_available(module.weight, module.lora_right, module.lora_left)
            with deepspeed.zero.GatheredParameters(held, modifier_rank=0, enabled=bool(held)):
                module.weight.data += (module.lora_right @ module.lora_left).t()
    state = {}
    if engine.global_rank == 0:
        state = dict(engine.module.state_dict())  # buffers; empty weights at stage 3
    for name, parameter in engine.module.named_parameters():
        held = not_available(parameter)
        with deepspeed.zero.GatheredParameters(held, enabled=bool(held)):
            if engine.global_rank == 0:
                state[name] = parameter.data.cpu().clone()
    if engine.global_rank == 0:
        torch.save({name: value for name, value in state.items() if "lora" not in name}, path)


def engines(stage: int) -> tuple[deepspeed.DeepSpeedEngine, ...]:
    """Return actor, reference and critic."""
    ranks, per_node = deepspeed.comm.get_world_size(), get_accelerator().device_count()

    def config(**zero: int) -> dict:
        batch = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * ranks}
        return {**batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}

    torch.manual_seed(0)
    with deepspeed.zero.Init(enabled=stage == 3):
        actor, critic = LlamaForCausalLM(LlamaConfig(**SIZES)), Critic()
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(**SIZES))
    actor.requires_grad_(False)
    for name, module in [*actor.named_modules()]:
        if isinstance(module, nn.Linear) and ".layers." in f".{name}":
            recursive_setattr(actor, name, Adapted(recursive_getattr(actor, name)))
    mixz = {}
    if stage == 3:
        mixz = {"zero_quantized_nontrainable_weights": True, "zero_hpz_partition_size": per_node}
    trained = [each for each in actor.parameters() if each.requires_grad]
    actor, *_ = deepspeed.initialize(
        model=actor, optimizer=FusedAdam(trained, lr=1e-2), config=config(**mixz)
    )
    reference, *_ = deepspeed.initialize(model=reference, config=config())
    critic, *_ = deepspeed.initialize(
        model=critic, optimizer=FusedAdam(critic.parameters(), lr=1e-2), config=config()
    )
    if mixz:
        actor.optimizer.quantize_nontrainable_params()
    return actor, reference, critic


def main() -> None:
    """Train, save if there is a folder for it, and print the critic's first and last loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output_dir")
    args = deepspeed.add_config_arguments(parser).parse_args()
    get_accelerator().set_device(max(0, args.local_rank))
    deepspeed.init_distributed()
    actor, reference, critic = engines(args.stage)
    losses = []
    prompts = torch.randint(0, WORDS, (4, PROMPT), device=get_accelerator().current_device_name())
    for _ in range(args.steps):
        actor.eval()
        with torch.no_grad():
            tokens = actor.module.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=ANSWER,
                min_new_tokens=ANSWER, do_sample=True, pad_token_id=0, synced_gpus=args.stage == 3,
            )  # fmt: skip
            actor.train()
            before = log_probabilities(actor(tokens).logits, tokens)
            drift = before - log_probabilities(reference(tokens).logits, tokens)
            score = (tokens[:, PROMPT:] % 2 == 0).float().mean(-1, keepdim=True)
            advantage = score - 0.1 * drift - critic.values(tokens)[:, PROMPT - 1 : -1]
        now = log_probabilities(actor(tokens, use_cache=False).logits, tokens)
        actor.backward(-(advantage * (now - before).exp()).mean())
        actor.step()
        loss = (critic.values(tokens)[:, PROMPT - 1 :].float() - score).square().mean()
        critic.backward(loss)
        critic.step()
        losses.append(loss.item())
    if args.output_dir:
        os.makedirs(args.output_dir, exist_ok=True)
        for name, engine in (("actor", actor), ("critic", critic)):
            save(engine, os.path.join(args.output_dir, f"{name}.pt"))
    if actor.global_rank == 0:
        print(f"loss of the critic {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
