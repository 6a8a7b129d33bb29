"""The loops in DeepSpeed's style make 10 or 20 steps and learn."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tests.ranks import ranks

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "deepspeed"
COMMANDS = (
    "image_classifier.py --deepspeed --stage 2",
    "image_classifier.py --stage 3 --dtype fp16",
    "gan.py --deepspeed_config {folder}/gan.json",
    "bf16_training.py --deepspeed_config {folder}/bf16_zero3.json --activation_checkpointing "
    "--steps 10",
    "supervised_finetuning.py --deepspeed --zero_stage 3 --gradient_checkpointing --steps 10",
    "supervised_finetuning.py --zero_stage 2 --offload --dtype fp32 --steps 10",
)


SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


def printed(command: str) -> str:
    """What the first rank prints at the end."""
    name, *flags = command.format(folder=FOLDER).split()
    sys.argv = [name, *flags]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return text.getvalue()


def numbers(text: str) -> list[float]:
    """The two numbers of "NAME FIRST -> LAST"; on other ranks two that are in order."""
    if dist.get_rank():
        return [1.0, 0.0]
    return [float(number) for number in re.search(r"(\d+\.\d+) -> (\d+\.\d+)\n$", text).groups()]


@pytest.mark.parametrize("command", COMMANDS)
@ranks(2, timeout=120)
def test_a_loop_learns(command):
    first, last = numbers(printed(command))
    assert last < 0.9 * first


@ranks(2, timeout=120)
def test_the_masked_language_model_goes_on_where_it_stopped(tmp_path):
    command = f"masked_language_model.py --steps 10 --checkpoint_dir {tmp_path}"
    first, middle = numbers(printed(command))
    text = printed(command)
    assert dist.get_rank() or text.startswith("from step 10: ")
    then, last = numbers(text)
    assert last < middle < first or dist.get_rank()
    whole = printed("masked_language_model.py --steps 20")
    assert numbers(whole)[1] == last


@ranks(4, ranks_per_node=2, timeout=120)
def test_an_actor_and_its_critic_learn_and_what_they_save_loads(tmp_path):
    first, last = numbers(printed(f"rlhf.py --deepspeed --steps 8 --output_dir {tmp_path}"))
    assert last < 0.5 * first
    dist.barrier()
    saved = torch.load(tmp_path / "actor.pt")
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.load_state_dict(saved)
    torch.manual_seed(0)
    start = LlamaForCausalLM(LlamaConfig(**SIZES)).state_dict()
    moved = {name for name, value in saved.items() if (value - start[name]).abs().max() > 0.02}
    assert moved == {name for name in start if ".layers." in name and start[name].ndim == 2}
    assert torch.load(tmp_path / "critic.pt")["head.weight"].shape == (1, SIZES["hidden_size"])


def test_all_loops_are_run():
    scripts = {command.partition(" ")[0] for command in COMMANDS}
    scripts |= {"masked_language_model.py", "rlhf.py"}
    assert scripts == {path.name for path in FOLDER.glob("*.py")}
