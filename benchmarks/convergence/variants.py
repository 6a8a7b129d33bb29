"""The variants of a convergence comparison, and what all of its runs share.

Variants differ only in their ZeRO++ settings, and `int8-tokens` in a flag of experts. Model, text,
order of the samples and learning rate follow from the recipe and the seed, so variants are compared
seed by seed.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.shared.zero_json import zero_json
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp.errors import InputError

EVAL_MICRO_BATCH = 8  # held-out samples of one forward pass on one rank
SPIKE, SPIKE_FACTOR = 10, 5.0  # iterations, and what their learning rate is multiplied by
# A step in fp32 takes 4 ranks on 2 idle cores about 0.2 s.
FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 8 --num-workers 0 "
    "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0"
)


BASELINE = "baseline"
VARIANTS: Mapping[str, str] = MappingProxyType(
    {  # name -> meaning
        BASELINE: "ZeRO stage 3, nothing quantized",
        "qwz": "weights in INT8",
        "hpz": "a secondary copy of the weights in each node",
        "qgz": "gradients in INT8 then INT4",
        "zeropp": "all three",
        "zeropp-4-4": "all three, gradients in INT4 in both hops",
        "code-steps": "all three, weights as changes of their codes, all coded",
        "code-steps-int3": "the same, gradients in INT8 then INT3",
        "int8-tokens": "nothing quantized but rows that cross nodes towards experts, in INT8",
    }
)
FLAGS_OF: Mapping[str, str] = MappingProxyType({"int8-tokens": "--moe-dispatch-bits 8"})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all runs share; `flags` are those of pretrain_gpt.py, the last of a kind counts.

    eval_interval: iterations. eval_samples: held-out samples, the same at every evaluation.
    lr_spike: the first of `SPIKE` iterations whose learning rate is multiplied; 0 for none.
    """

    steps: int
    ranks: int
    ranks_per_node: int
    dtype: str
    eval_interval: int
    eval_samples: int
    flags: str = FLAGS
    lr_spike: int = 0

    def config(self, variant: str, seed: int) -> Config:
        """The configuration of one run; raises InputError for wrong flags."""
        round_samples = EVAL_MICRO_BATCH * self.ranks
        if self.eval_samples < 1 or self.eval_samples % round_samples:
            raise InputError(
                f"--eval-samples {self.eval_samples}: expected a multiple of {round_samples} "
                f"({EVAL_MICRO_BATCH} on each of {self.ranks} ranks)"
            )
        words = [
            *self.flags.split(),
            *FLAGS_OF.get(variant, "").split(),
            "--train-iters",
            str(self.steps),
            "--seed",
            str(seed),
        ]
        words += [] if self.dtype == "fp32" else [f"--{self.dtype}"]
        words += ["--eval-interval", str(self.steps + 1)]  # the benchmark evaluates by itself
        words += ["--log-interval", str(self.steps)]  # one interval: bytes of all steps
        config = parse([*words, "--deepspeed_config", json.dumps(self.zero(variant))], self.ranks)
        rounds = -(-self.eval_samples // config.batch.global_batch_size)
        evaluation = dataclasses.replace(config.evaluation, eval_iters=rounds)
        return dataclasses.replace(config, evaluation=evaluation)

    def zero(self, name: str) -> dict:
        """DeepSpeed's JSON of a variant."""
        return zero_json("zero3" if name in (BASELINE, *FLAGS_OF) else name, self.ranks_per_node)
