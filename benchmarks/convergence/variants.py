"""The variants of a convergence comparison, and what all of its runs share.

Variants differ only in their ZeRO++ settings. Model, text, order of the samples and learning rate
follow from the recipe and the seed, so variants are compared seed by seed.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp.errors import InputError

EVAL_MICRO_BATCH = 8  # held-out samples of one forward pass on one rank
# A step in fp32 takes 4 ranks on 2 idle cores about 0.2 s.
FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 8 --num-workers 0 "
    "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0"
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Which parts of ZeRO++ are on; `gradient_bits` is (within a node, across nodes)."""

    meaning: str
    qwz: bool = False
    hpz: bool = False
    gradient_bits: tuple[int, int] | None = None


BASELINE = "baseline"
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        BASELINE: Variant(meaning="ZeRO stage 3, nothing quantized"),
        "qwz": Variant(meaning="weights in INT8", qwz=True),
        "hpz": Variant(meaning="a secondary copy of the weights in each node", hpz=True),
        "qgz": Variant(meaning="gradients in INT8 then INT4", gradient_bits=(8, 4)),
        "zeropp": Variant(meaning="all three", qwz=True, hpz=True, gradient_bits=(8, 4)),
        "zeropp-4-4": Variant(
            meaning="all three, gradients in INT4 in both hops",
            qwz=True, hpz=True, gradient_bits=(4, 4),
        ),
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all runs share; `flags` are those of pretrain_gpt.py, the last of a kind counts.

    eval_interval: iterations. eval_samples: held-out samples, the same at every evaluation.
    """

    steps: int
    ranks: int
    ranks_per_node: int
    dtype: str
    eval_interval: int
    eval_samples: int
    flags: str = FLAGS

    def config(self, variant: str, seed: int) -> Config:
        """The configuration of one run; raises InputError for wrong flags."""
        round_samples = EVAL_MICRO_BATCH * self.ranks
        if self.eval_samples < 1 or self.eval_samples % round_samples:
            raise InputError(
                f"--eval-samples {self.eval_samples}: expected a multiple of {round_samples} "
                f"({EVAL_MICRO_BATCH} on each of {self.ranks} ranks)"
            )
        words = [*self.flags.split(), "--train-iters", str(self.steps), "--seed", str(seed)]
        words += [] if self.dtype == "fp32" else [f"--{self.dtype}"]
        words += ["--eval-interval", str(self.steps + 1)]  # the benchmark evaluates by itself
        words += ["--log-interval", str(self.steps)]  # one interval: bytes of all steps
        config = parse([*words, "--deepspeed_config", json.dumps(self.zero(variant))], self.ranks)
        rounds = -(-self.eval_samples // config.batch.global_batch_size)
        evaluation = dataclasses.replace(config.evaluation, eval_iters=rounds)
        return dataclasses.replace(config, evaluation=evaluation)

    def zero(self, name: str) -> dict:
        """DeepSpeed's JSON of a variant."""
        variant = VARIANTS[name]
        zero: dict = {"stage": 3}
        zeropp: dict = {"ranks_per_node": self.ranks_per_node}
        if variant.qwz:
            zero["zero_quantized_weights"] = True
        if variant.hpz:
            zero["zero_hpz_partition_size"] = self.ranks_per_node
        if variant.gradient_bits:
            zero["zero_quantized_gradients"] = True
            zeropp["gradient_bits"] = list(variant.gradient_bits)
        return {"zero_optimization": zero, "zeropp": zeropp}
