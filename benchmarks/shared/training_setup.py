"""What is trained in a comparison: the model's shape, the dtype, the ranks, and the same batches.

Everything is passed to Megatron-Z++ as its own flags, so a comparison runs what a user runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from benchmarks.shared.byte_text import NUM_BYTES, ByteText
from megatron_zpp.data.gpt_dataset import MockDataset
from megatron_zpp.data.loader import Batch, Loader, Samples
from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config, ParallelConfig
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment

CPU = torch.device("cpu")
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
MANY_ITERATIONS = 100_000  # more than any comparison runs


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One shape in one dtype at one ZeRO stage on the ranks of this process group."""

    shape: Mapping[str, int]
    ranks: Ranks
    dtype: str = "fp32"
    stage: int = 3
    extra_flags: str = ""

    @property
    def config(self) -> Config:
        """The configuration that the flags give."""
        text = flags(self.shape, self.ranks.num_ranks)
        text += f" --zero-stage {self.stage} {self.extra_flags}"
        if self.dtype != "fp32":
            text += f" --{self.dtype}"
        return parse(text.split(), self.ranks.num_ranks)

    @property
    def vocab_size(self) -> int:
        return self.shape["vocab"]

    @property
    def micro_batches(self) -> int:
        """Of a replica in a step: the ranks that split a model take those of all of them."""
        ranks = self.ranks
        return self.shape["micro-batches"] * ranks.num_ranks // ranks.data_parallel_size

    def steps(self, count: int) -> list[list[Batch]]:
        """This rank's micro-batches of the first `count` steps of random tokens, on its device."""
        model, seed = self.config.model, (self.config.training.seed, 0)
        samples = MockDataset(MANY_ITERATIONS, model.seq_length, self.vocab_size, seed)
        return self._batches(samples, count)

    def steps_of_text(self, count: int) -> list[list[Batch]]:
        """This rank's micro-batches of `count` steps of real text; ids are bytes.

        Raises InputError for a vocabulary that has fewer.
        """
        if self.vocab_size < NUM_BYTES:
            raise InputError(f"--vocab {self.vocab_size}: the text needs {NUM_BYTES} ids")
        size = count * self.config.batch.global_batch_size
        return self._batches(ByteText(size, self.config.model.seq_length), count)

    def _batches(self, samples: Samples, count: int) -> list[list[Batch]]:
        config, ranks = self.config, self.ranks
        with Loader(
            samples,
            config.data,
            consumed_samples=0,
            micro_batch_size=config.batch.micro_batch_size,
            rank=ranks.data_parallel_rank,
            world=ranks.data_parallel_size,
            eod=self.vocab_size - 1,
            device=ranks.device,
        ) as loader:
            return [[next(loader) for _ in range(self.micro_batches)] for _ in range(count)]


def joined_ranks() -> Ranks:
    """Join the process group of ranks that split nothing but the data."""
    return join_ranks(Environment.read(), ParallelConfig())


def largest_of_ranks(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    result = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.item()


def mean_of_ranks(loss: torch.Tensor) -> float:
    """The mean of a loss over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def flags(shape: Mapping[str, int], num_ranks: int) -> str:
    """The shape as flags of pretrain_gpt.py, without dropout, so that losses can be compared."""
    samples = shape["micro-batch"] * shape["micro-batches"] * num_ranks
    return (
        f"--num-layers {shape['layers']} --hidden-size {shape['hidden']} "
        f"--num-attention-heads {shape['heads']} --seq-length {shape['seq']} "
        f"--micro-batch-size {shape['micro-batch']} --global-batch-size {samples} "
        "--hidden-dropout 0 --attention-dropout 0 --mock-data --num-workers 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {shape['vocab']} --eval-iters 0 "
        f"--train-iters {MANY_ITERATIONS} --lr {LEARNING_RATE} --lr-decay-style constant "
        f"--clip-grad {CLIP} --weight-decay {WEIGHT_DECAY}"
    )
