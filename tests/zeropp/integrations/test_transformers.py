"""Hugging Face's Trainer and TRL's, sharding by FSDP2 on CPUs, with and without ZeRO++."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from tests.ranks import ranks
from zeropp.integrations.transformers import ZeroppCallback

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 1}}
ZERO = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
ZEROPP = PLAIN | {"zero_optimization": ZERO}
STEPS = 5


def llama() -> LlamaForCausalLM:
    """A small Llama with a tied head, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes, **heads))


def arguments(folder: Path, kind: type = TrainingArguments, **more: object) -> TrainingArguments:
    """Arguments of a run that is sharded by FSDP2.

    accelerate shards by FSDP2 only where the ranks have GPUs, or so it is told here.
    """
    options = {"save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    options |= {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    made = kind(str(folder), use_cpu=True, fsdp=True, **options | more)
    assert made.device.type == "cpu"  # starts accelerate
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


def losses(trainer: Trainer, **options: object) -> list[float]:
    trainer.train(**options)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(
    folder: Path, *callbacks: ZeroppCallback, model: object = None, **more: object
) -> Trainer:
    return Trainer(
        model or llama(), arguments(folder, **more), train_dataset=samples(), callbacks=[*callbacks]
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2, timeout=120)
def test_unquantized_the_trainer_learns_the_same(accumulation, tmp_path):
    more = {"gradient_accumulation_steps": accumulation}
    expected = losses(trainer(tmp_path, **more))
    callback = ZeroppCallback(PLAIN)
    assert losses(trainer(tmp_path, callback, **more)) == pytest.approx(expected, rel=1e-6)
    sent, formula = callback.attached.traffic.sent, callback.attached.expected_traffic(accumulation)
    assert sent == {key: STEPS * num_bytes for key, num_bytes in formula.items()}


@ranks(2, timeout=120)
def test_with_zeropp_a_resumed_run_has_the_same_losses(tmp_path):
    path = tmp_path / f"{dist.get_rank()}.json"
    path.write_text(json.dumps(ZEROPP))
    expected = losses(trainer(tmp_path))
    saved = {"save_strategy": "steps", "save_steps": 3}
    whole = losses(trainer(tmp_path / "run", ZeroppCallback(path), **saved))
    assert whole[0] == pytest.approx(expected[0], rel=5e-3)  # what INT8 may move a loss by
    assert whole != expected
    resumed = trainer(tmp_path / "run", ZeroppCallback(path), **saved)
    assert losses(resumed, resume_from_checkpoint=str(tmp_path / "run/checkpoint-3")) == whole


@ranks(2, timeout=120)
def test_adapters_of_peft(tmp_path):
    def adapted() -> torch.nn.Module:
        return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    expected = losses(trainer(tmp_path, model=adapted()))
    callback = ZeroppCallback(PLAIN)
    unquantized = losses(trainer(tmp_path, callback, model=adapted()))
    assert unquantized == pytest.approx(expected, rel=1e-6)


@ranks(2, timeout=120)
def test_trl_trains_too(tmp_path):
    from datasets import Dataset  # takes seconds to import, as does TRL: in the ranks only
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": sample["labels"].tolist()} for sample in samples()])
    words = WordLevel({str(number): number for number in range(64)}, "0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="0", pad_token="1"
    )

    def sft(*callbacks: ZeroppCallback) -> list[float]:
        made = arguments(tmp_path, SFTConfig, max_length=16, bf16=False)
        made.activation_checkpointing = False
        return losses(
            SFTTrainer(
                llama(),
                made,
                train_dataset=data,
                callbacks=[*callbacks],
                processing_class=tokenizer,
            )  # fmt: skip
        )

    assert sft(ZeroppCallback(PLAIN)) == pytest.approx(sft(), rel=1e-6)
