"""Records a small checkpoint that torchtitan writes on a CPU, with what its model answers.

    pip install torchtitan
    python tools/record/record_torchtitan.py

A Llama 3 of torchtitan, sharded by FSDP2 on two ranks, in fp32, and its optimizer in torchtitan's
container; the state dict is put together as its CheckpointManager does.
"""

import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torchtitan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

RECORDED = Path(__file__).parents[2] / "tests/megatron_zpp/interchange/foreign/recorded"
SEQUENCE, VOCABULARY, STEPS = 16, 96, 3


def train(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(1)
    args = TransformerModelArgs(
        dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, multiple_of=8,
        rope_theta=500000, max_seq_len=SEQUENCE,
    )  # fmt: skip
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}
    optimizer = OptimizersContainer([model], torch.optim.AdamW, settings)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (STEPS + 2, 4, SEQUENCE + 1), generator=generator)

    def step(batch: torch.Tensor) -> float:
        own = batch[2 * rank : 2 * rank + 2]
        logits = model(own[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / 2

    for batch in tokens[:STEPS]:
        step(batch)
    state = ModelWrapper(model).state_dict() | {
        "optimizer": optimizer.state_dict(),
        "train_state": {"step": torch.tensor(STEPS), "ntokens_seen": torch.tensor(192)},
    }
    dcp.save(state, checkpoint_id=folder / "saved/checkpoint/step-3")
    with torch.no_grad():
        logits = model(tokens[0, :, :-1])
    losses = [step(batch) for batch in tokens[STEPS:]]
    if rank == 0:
        print(losses, torchtitan.__version__, torch.__version__)
        torch.save({"tokens": tokens, "logits": logits, "losses": losses}, folder / "answers.pt")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        mp.spawn(train, (folder,), nprocs=2)
        with tarfile.open(RECORDED / "torchtitan_llama.tar.xz", "w:xz") as archive:
            archive.add(folder / "saved", arcname=".")
        (folder / "answers.pt").rename(RECORDED / "torchtitan_llama_answers.pt")
