"""Hugging Face's Trainer and TRL's, sharding by FSDP2 on CPUs, with and without ZeRO++."""

import json

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 1}}
ZERO = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
ZEROPP = PLAIN | {"zero_optimization": ZERO}
EXPERTS = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 2}}
ALL_OF_IT = ZERO | {"zero_hpz_partition_size": 2}


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2, timeout=120)
def test_unquantized_the_trainer_learns_the_same(accumulation, tmp_path):
    from tests.zeropp.integrations.transformers_run import STEPS, ZeroppCallback, losses, trainer

    more = {"gradient_accumulation_steps": accumulation}
    expected = losses(trainer(tmp_path, **more))
    callback = ZeroppCallback(PLAIN)
    assert losses(trainer(tmp_path, callback, **more)) == pytest.approx(expected, rel=1e-6)
    sent, formula = callback.attached.traffic.sent, callback.attached.expected_traffic(accumulation)
    assert sent == {key: STEPS * num_bytes for key, num_bytes in formula.items()}


@ranks(2, timeout=120)
def test_with_zeropp_a_resumed_run_has_the_same_losses(tmp_path):
    from tests.zeropp.integrations.transformers_run import ZeroppCallback, losses, trainer

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
    from peft import LoraConfig, get_peft_model

    from tests.zeropp.integrations.transformers_run import ZeroppCallback, llama, losses, trainer

    def adapted() -> torch.nn.Module:
        return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    expected = losses(trainer(tmp_path, model=adapted()))
    callback = ZeroppCallback(PLAIN)
    unquantized = losses(trainer(tmp_path, callback, model=adapted()))
    assert unquantized == pytest.approx(expected, rel=1e-6)


@ranks(2, timeout=120)
def test_trl_trains_too(tmp_path):
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from tests.zeropp.integrations.transformers_run import (
        ZeroppCallback,
        arguments,
        llama,
        losses,
        samples,
    )

    data = Dataset.from_list([{"input_ids": sample["labels"].tolist()} for sample in samples()])
    words = WordLevel({str(number): number for number in range(64)}, "0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="0", pad_token="1"
    )

    def sft(*callbacks: object) -> list[float]:
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


@pytest.mark.parametrize(
    "parallel",
    [
        {"fsdp_size": 4, "ep_size": 4},  # each rank has experts of its own
        {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
    ],
)
@ranks(4, timeout=180)
def test_experts_that_ranks_split(parallel, tmp_path):
    """`from_pretrained` shards them as units of their own, on another mesh than the other units."""
    pytest.importorskip("transformers.distributed.expert_parallel", exc_type=ImportError)
    from tests.zeropp.integrations.expert_parallel_run import ZeroppCallback, losses, save_model

    save_model(tmp_path)
    expected = losses(tmp_path, parallel)
    sent = []
    for config in (EXPERTS, EXPERTS | {"zero_optimization": ALL_OF_IT}):
        callback = ZeroppCallback(config)
        measured = losses(tmp_path, parallel, callback)
        near = 1e-6 if config is EXPERTS else 3e-3
        assert measured == pytest.approx(expected, rel=near)
        attached = callback.attached
        assert attached.skipped == {} and "model.layers.1.mlp.experts" in attached.units
        crossing = (n for (_, hop), n in attached.traffic.sent.items() if hop == "across_nodes")
        total = torch.tensor(sum(crossing))
        dist.all_reduce(total)
        sent.append(total.item())
    assert 5 * sent[1] < sent[0]
