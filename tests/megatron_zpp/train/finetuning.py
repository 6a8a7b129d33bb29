"""Flags of short runs that fine-tune a tiny model on a few examples."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from tests.megatron_zpp.interchange.foreign_models import add_tokenizer, saved

SENTENCES = ("the cat sat on the mat", "a dog ran to it", "the dog sat on a cat and it ran")
MIXZ = {
    "stage": 3, "zero_quantized_nontrainable_weights": True, "zero_hpz_partition_size": 2,
}  # fmt: skip
RUN = "--train-iters 3 --micro-batch-size 1 --global-batch-size 4 --lora-rank 4 --lr-decay-style "
RUN += "constant --split 90,10,0 "


def flags_for(model: PreTrainedModel, folder: Path) -> str:
    """The flags of a model, which is saved in the folder, and of examples for it."""
    folder = saved(model, folder)
    add_tokenizer(folder)
    examples = folder / "examples.jsonl"
    lines = [
        {"prompt": sentence[: len(sentence) // 2], "answer": sentence[len(sentence) // 2 :]}
        for sentence in SENTENCES
    ]
    examples.write_text("".join(json.dumps(line) + "\n" for line in lines * 20))
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    return f"{tokenizer} --pretrained-checkpoint {folder} --data-path {examples} {RUN}"


def folder_of(flags: str) -> str:
    """The folder of the model."""
    return flags.split("--pretrained-checkpoint ")[1].split()[0]
