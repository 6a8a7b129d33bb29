"""Records small checkpoints that DeepSpeed writes on a CPU, with what its models answer.

    DS_ACCELERATOR=cpu pip install megatron-core deepspeed
    python tools/record/record_deepspeed.py

As Megatron-DeepSpeed is no package, DeepSpeed's engine trains megatron-core's models of
record_megatron.py, in a module that calls them `language_model`, and stores the arguments as
Megatron-DeepSpeed does. Two ranks; ZeRO 2 and 3 in fp32, ZeRO 2 made universal, and ZeRO 3 in bf16
made universal, which is kept in that form alone: its answers are those of an fp32 engine into which
DeepSpeed loaded it.
"""

import os
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).parent))
import record_megatron as megatron

TAG, UNIVERSAL_TAG = "global_step3", "global_step3_universal"
BF16 = "zero3_bf16"
# archive: model, stage of ZeRO, tensor ranks; two ranks in all
SAVED = {
    "zero2_gpt2": ("gpt2", 2, 1),
    "zero3_llama": ("llama", 3, 1),
    "zero2_split": ("llama", 2, 2),
    BF16: ("llama", 3, 1),
}


class MegatronModel(nn.Module):
    """A model of megatron-core under Megatron-DeepSpeed's name."""

    def __init__(self, name: str, tensor_ranks: int) -> None:
        super().__init__()
        self.language_model = megatron.make_gpt(name, tensor_ranks)
        self.register_state_dict_post_hook(remove_extra_states)

    def forward(self, tokens: torch.Tensor, with_loss: bool) -> torch.Tensor:
        return megatron.run(self.language_model, tokens, with_loss)


def parallel_groups() -> SimpleNamespace:
    """Return megatron-core's groups under the names that Megatron-DeepSpeed has for them too."""
    names = [
        f"get_{axis}_parallel_{what}"
        for axis in ("data", "tensor_model", "pipeline_model")
        for what in ("world_size", "rank", "group")
    ]
    groups = {name: getattr(parallel_state, name) for name in names}
    groups |= {name.replace("tensor_model", "model"): each for name, each in groups.items()}
    return SimpleNamespace(**groups)


def remove_extra_states(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """Remove what Megatron-DeepSpeed's models do not have."""
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]


class Engine:
    """One rank's engine of DeepSpeed."""

    def __init__(self, name: str, stage: int, tensor_ranks: int, rank: int, **config: Any) -> None:
        self.tensor_ranks, self.data_ranks = tensor_ranks, 2 // tensor_ranks
        self.part = rank % self.data_ranks
        model = MegatronModel(name, tensor_ranks)
        config |= {
            "train_micro_batch_size_per_gpu": 4 // self.data_ranks,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        # Of two groups, as Megatron has, but with the same decay.
        groups = [
            {"params": [each for each in model.parameters() if each.ndim > 1]},
            {"params": [each for each in model.parameters() if each.ndim == 1]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=parallel_groups()
        )

    def step(self, batch: torch.Tensor) -> float:
        loss = self.engine(batch.chunk(self.data_ranks)[self.part], True).mean()
        self.engine.backward(loss)
        self.engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return total.item() / 2

    def answers(self, tokens: torch.Tensor) -> dict:
        with torch.no_grad():
            logits = self.engine(tokens[0], False)
        if self.tensor_ranks > 1:  # each has the logits of a part of the vocabulary
            parts = [torch.empty_like(logits) for _ in range(self.tensor_ranks)]
            torch.distributed.all_gather(parts, logits.contiguous())
            logits = torch.cat(parts, dim=-1)
        losses = [self.step(batch) for batch in tokens[megatron.STEPS :]]
        return {"tokens": tokens, "logits": logits.detach().clone(), "losses": losses}


def start(rank: int, tensor_ranks: int, store: Path) -> None:
    megatron.start(rank, tensor_ranks, 1, str(store), 2 // tensor_ranks)
    os.environ.update(LOCAL_SIZE="2", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")


def train(rank: int, target: str, folder: Path) -> None:
    name, stage, tensor_ranks = SAVED[target]
    start(rank, tensor_ranks, folder / "store")
    with megatron.OnCpu():
        engine = Engine(
            name, stage, tensor_ranks, rank, **{"bf16": {"enabled": True}} if target == BF16 else {}
        )
        tokens = megatron.batches()
        for batch in tokens[: megatron.STEPS]:
            engine.step(batch)
        args = vars(megatron.args_of(name, tensor_ranks, 1)) | {"tokenizer_type": "NullTokenizer"}
        client_state = {
            "iteration": 3, "args": Namespace(**args), "checkpoint_version": 3.0,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }  # fmt: skip
        engine.engine.save_checkpoint(str(folder / "saved"), tag=TAG, client_state=client_state)
        answers = engine.answers(tokens)
    keep(answers, target, rank, folder)


def resume(rank: int, target: str, folder: Path) -> None:
    """Let an fp32 engine load what was made universal, and answer."""
    name, stage, tensor_ranks = SAVED[target]
    start(rank, tensor_ranks, folder / "store_of_universal")
    with megatron.OnCpu():
        engine = Engine(name, stage, tensor_ranks, rank, checkpoint={"load_universal": True})
        engine.engine.load_checkpoint(str(folder / "universal"), tag=UNIVERSAL_TAG)
        # DeepSpeed gives all groups the same tensor, so that each counts the steps of the others.
        for state in engine.engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
        answers = engine.answers(megatron.batches())
    keep(answers, target, rank, folder)


def keep(answers: dict, target: str, rank: int, folder: Path) -> None:
    if rank == 0:
        print(target, answers["losses"], {"deepspeed": deepspeed.__version__})
        torch.save(answers, folder / "answers.pt")


def pack(folder: Path, name: str) -> None:
    with tarfile.open(megatron.RECORDED / f"deepspeed_{name}.tar.xz", "w:xz") as archive:
        archive.add(folder, arcname=".", filter=without_scripts)


def without_scripts(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith(".py") else entry


def make_universal(folder: Path) -> None:
    universal = folder / "universal" / UNIVERSAL_TAG
    to_universal(
        Namespace(
            input_folder=str(folder / "saved" / TAG), output_folder=str(universal),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
            strict=True, inject_missing_state=False, hf_checkpoint_path=None,
            safe_serialization=False, no_strict=False,
        )
    )  # fmt: skip
    (universal.parent / "latest_universal").write_text(universal.name)


def record(target: str, folder: Path) -> None:
    mp.spawn(train, (target, folder), nprocs=2)
    name = target.split("_")[1]
    if target != BF16:
        pack(folder / "saved", target)
    if target in (BF16, "zero2_gpt2"):
        make_universal(folder)
        pack(folder / "universal", f"universal_{name}")
    if target == BF16:
        mp.spawn(resume, (target, folder), nprocs=2)
    (folder / "answers.pt").rename(megatron.RECORDED / f"deepspeed_{name}_answers.pt")


if __name__ == "__main__":
    for target in sys.argv[1:] or SAVED:
        with tempfile.TemporaryDirectory() as temporary:
            record(target, Path(temporary))
