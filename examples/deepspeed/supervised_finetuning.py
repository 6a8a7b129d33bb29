"""Fine-tune a language model on answers, as step 1 of DeepSpeed-Chat does.

zeropp --num_ranks 2 examples/deepspeed/supervised_finetuning.py --deepspeed --zero_stage 3
"""

import argparse

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from zeropp import deepspeed
from zeropp.deepspeed import get_accelerator
from zeropp.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

WORDS, QUESTION, ANSWER = 64, 8, 8  # words of the vocabulary, of a question, of its answer


def arguments() -> argparse.Namespace:
    """Return the program's flags, and DeepSpeed's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--zero_stage", type=int, default=0)
    return deepspeed.add_config_arguments(parser).parse_args()


def configuration(args: argparse.Namespace, world_size: int) -> dict:
    """Return DeepSpeed's configuration as a dict."""
    micro = args.per_device_train_batch_size
    return {
        "train_batch_size": micro * world_size * args.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": micro,
        "steps_per_print": 10,
        "bf16": {"enabled": args.dtype == "bf16"},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": args.zero_stage,
            "offload_optimizer": {"device": "cpu" if args.offload else "none"},
        },
    }


def conversations() -> list[dict[str, torch.Tensor]]:
    """Return questions whose answers repeat them; only answers have labels."""
    torch.manual_seed(0)
    samples = []
    for question in torch.randint(0, WORDS, (256, QUESTION)) // 8:
        tokens = torch.cat([question, question])
        labels = tokens.clone()
        labels[:QUESTION] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def optimizer_of(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return Adam on the device or, if the update is offloaded, on the CPU; biases do not decay."""
    parameters = [*model.named_parameters()]
    groups = [
        {
            "params": [value for name, value in parameters if ("norm" in name) == exempt],
            "weight_decay": 0.0 if exempt else args.weight_decay,
        }
        for exempt in (False, True)
    ]
    kind = DeepSpeedCPUAdam if args.offload else FusedAdam
    return kind(groups, lr=args.learning_rate, betas=(0.9, 0.95))


def main() -> None:
    """Train, evaluate, and print the losses of the evaluations."""
    args = arguments()
    if args.local_rank >= 0:
        get_accelerator().set_device(args.local_rank)
    device = torch.device(get_accelerator().device_name())
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        )
    )  # fmt: skip
    samples = conversations()
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, args.per_device_train_batch_size, sampler=sampler)
    optimizer = optimizer_of(args, model)
    schedule = get_scheduler("cosine", optimizer, args.num_warmup_steps, args.steps)
    model, optimizer, _, schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, lr_scheduler=schedule,
        config=configuration(args, deepspeed.comm.get_world_size()), dist_init_required=True,
    )  # fmt: skip
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    def evaluate() -> float:
        model.eval()
        total = torch.zeros((), device=device)
        with torch.no_grad():
            for batch in loader:
                batch = {name: value.to(device) for name, value in batch.items()}
                total += model(**batch).loss.float()
        deepspeed.comm.all_reduce(total)
        return total.item() / len(loader) / deepspeed.comm.get_world_size()

    before = evaluate()
    while model.global_steps < args.steps:
        model.train()
        for batch in loader:
            batch = {name: value.to(device) for name, value in batch.items()}
            loss = model(**batch, use_cache=False).loss
            model.backward(loss)
            model.step()
            if model.global_steps == args.steps:
                break
        model.tput_timer.update_epoch_count()
    after = evaluate()
    if model.global_rank == 0:
        print(f"loss {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main()
