"""Fine-tunes the model of `--pretrained-checkpoint`, with LoRA adapters or all of its weights.

    megatron-zpp finetune --pretrained-checkpoint checkpoints/smollm2 --lora-rank 8 \\
        --data-path examples.jsonl --train-iters 100

The same program as pretraining, which also takes `--pretrained-checkpoint`; here it is required.
"""

from collections.abc import Sequence

from megatron_zpp.commands import pretrain


def main(argv: Sequence[str], program: str = "megatron-zpp finetune") -> int:
    """Run the command; return the exit status."""
    return pretrain.main(argv, program, needs_pretrained=True)
