"""What is trained in a comparison: the model's shape, the format, the ranks, and the same batches.

Everything is told to Megatron-Z++ by its own flags, so a comparison runs what a person runs.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron_zpp.data.loader import Batch, Loader
from megatron_zpp.data.mock_dataset import MockDataset
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})
SHAPE = MappingProxyType(
    {
        "layers": (4, "transformer blocks"),
        "hidden": (256, "width of the residual stream"),
        "heads": (4, "attention heads"),
        "seq": (128, "tokens of a sample"),
        "vocab": (8192, "size of the vocabulary"),
        "micro-batch": (1, "samples of one forward pass on one rank"),
        "micro-batches": (2, "forward passes of one step"),
    }
)
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
UNENDING = 100_000  # iterations a run is told to make; a comparison makes fewer


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One shape in one format at one ZeRO stage on the ranks of this process group."""

    shape: tuple[tuple[str, int], ...]
    ranks: Ranks
    dtype: str = "fp32"
    stage: int = 3
    more: str = ""  # further flags

    @property
    def config(self) -> Config:
        """What Megatron-Z++'s flags make of it."""
        text = flags(dict(self.shape), self.ranks.num_ranks)
        text += f" --zero-stage {self.stage}" + ("" if self.dtype == "fp32" else f" --{self.dtype}")
        text += " " + self.more
        return parse(text.split(), self.ranks.num_ranks)

    @property
    def vocab_size(self) -> int:
        return dict(self.shape)["vocab"]

    def of(self, *, dtype: str, stage: int) -> "Setting":
        """The same in another format and at another stage."""
        return dataclasses.replace(self, dtype=dtype, stage=stage)

    def batches(self, steps: int) -> list[Batch]:
        """This rank's micro-batches of the first `steps` steps, on its device."""
        config, ranks = self.config, self.ranks
        micro_batches, seed = dict(self.shape)["micro-batches"], config.training.seed
        with Loader(
            MockDataset(UNENDING, config.model.seq_length, self.vocab_size, (seed, 0)),
            config.data,
            consumed_samples=0,
            micro_batch_size=config.batch.micro_batch_size,
            rank=ranks.rank,
            world=ranks.num_ranks,
            eod=self.vocab_size - 1,
            device=ranks.device,
        ) as loader:
            return [next(loader) for _ in range(steps * micro_batches)]

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = torch.tensor(value, dtype=torch.float64, device=self.ranks.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()


def add_flags(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """The shape's flags, each with its default: `SHAPE`'s, or one of `defaults`."""
    for name, (usual, meaning) in SHAPE.items():
        default = defaults.get(name.replace("-", "_"), usual)
        help_text = f"{meaning} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=help_text)


def shape_of(options: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    """The shape that parsed flags give."""
    return tuple((name, getattr(options, name.replace("-", "_"))) for name in SHAPE)


def flags(shape: dict[str, int], num_ranks: int) -> str:
    """The shape as flags of pretrain_gpt.py; without dropout, so that losses compare."""
    samples = shape["micro-batch"] * shape["micro-batches"] * num_ranks
    return (
        f"--num-layers {shape['layers']} --hidden-size {shape['hidden']} "
        f"--num-attention-heads {shape['heads']} --seq-length {shape['seq']} "
        f"--micro-batch-size {shape['micro-batch']} --global-batch-size {samples} "
        "--hidden-dropout 0 --attention-dropout 0 --mock-data --num-workers 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {shape['vocab']} --eval-iters 0 "
        f"--train-iters {UNENDING} --lr {LEARNING_RATE} --lr-decay-style constant "
        f"--clip-grad {CLIP} --weight-decay {WEIGHT_DECAY}"
    )
