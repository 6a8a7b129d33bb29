"""Records small checkpoints that DeepSpeed writes on a CPU, with what its models answer.

    DS_ACCELERATOR=cpu pip install megatron-core deepspeed
    python tests/megatron_zpp/models/foreign/record_deepspeed.py

As Megatron-DeepSpeed is no package, DeepSpeed's engine trains megatron-core's models of
record_megatron.py, in a module that calls them `language_model`, and stores the arguments as
Megatron-DeepSpeed does. Two ranks, fp32; ZeRO 2 and 3, and ZeRO 2 made universal.
"""

import os
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing as mp
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).parent))
import record_megatron as megatron

TAG = "global_step3"
# archive: model, stage of ZeRO, tensor ranks; two ranks in all
SAVED = {
    "zero2_gpt2": ("gpt2", 2, 1),
    "zero3_llama": ("llama", 3, 1),
    "zero2_split": ("llama", 2, 2),
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


def train(rank: int, name: str, stage: int, tensor_ranks: int, folder: Path) -> None:
    data_ranks = 2 // tensor_ranks
    megatron.start(rank, tensor_ranks, 1, str(folder / "store"), data_ranks)
    os.environ.update(LOCAL_SIZE="2", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    with megatron.OnCpu():
        model = MegatronModel(name, tensor_ranks)
        config = {
            "train_micro_batch_size_per_gpu": 4 // data_ranks,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        # Of two groups, as Megatron has, but with the same decay.
        groups = [
            {"params": [each for each in model.parameters() if each.ndim > 1]},
            {"params": [each for each in model.parameters() if each.ndim == 1]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=parallel_groups()
        )
        tokens = megatron.batches()

        def step(batch: torch.Tensor) -> float:
            loss = engine(batch.chunk(data_ranks)[rank % data_ranks], True).mean()
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            return total.item() / 2

        for batch in tokens[: megatron.STEPS]:
            step(batch)
        args = vars(megatron.args_of(name, tensor_ranks, 1)) | {"tokenizer_type": "NullTokenizer"}
        client_state = {
            "iteration": 3, "args": Namespace(**args), "checkpoint_version": 3.0,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }  # fmt: skip
        engine.save_checkpoint(str(folder / "saved"), tag=TAG, client_state=client_state)
        with torch.no_grad():
            logits = engine(tokens[0], False)
        if tensor_ranks > 1:  # each has the logits of a part of the vocabulary
            parts = [torch.empty_like(logits) for _ in range(tensor_ranks)]
            torch.distributed.all_gather(parts, logits.contiguous())
            logits = torch.cat(parts, dim=-1)
        losses = [step(batch) for batch in tokens[megatron.STEPS :]]
    if rank == 0:
        print(name, stage, losses, {"deepspeed": deepspeed.__version__})
        answers = {"tokens": tokens, "logits": logits.detach().clone(), "losses": losses}
        torch.save(answers, folder / "answers.pt")


def pack(folder: Path, name: str) -> None:
    with tarfile.open(megatron.RECORDED / f"deepspeed_{name}.tar.xz", "w:xz") as archive:
        archive.add(folder, arcname=".", filter=without_scripts)


def without_scripts(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith(".py") else entry


if __name__ == "__main__":
    for target in sys.argv[1:] or SAVED:
        name, stage, tensor_ranks = SAVED[target]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            mp.spawn(train, (name, stage, tensor_ranks, folder), nprocs=2)
            pack(folder / "saved", target)
            (folder / "answers.pt").rename(
                megatron.RECORDED / f"deepspeed_{target.split('_')[1]}_answers.pt"
            )
            if target == "zero2_gpt2":
                universal = folder / "universal" / f"{TAG}_universal"
                to_universal(
                    Namespace(
                        input_folder=str(folder / "saved" / TAG), output_folder=str(universal),
                        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
                        strict=True, inject_missing_state=False, hf_checkpoint_path=None,
                        safe_serialization=False, no_strict=False,
                    )
                )  # fmt: skip
                (universal.parent / "latest_universal").write_text(universal.name)
                pack(universal.parent, f"universal_{name}")
