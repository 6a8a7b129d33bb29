"""The variants of a convergence comparison, and what all of its runs share.

Variants differ in their ZeRO++ settings, those of Muon in the optimizer, and `int8-tokens` in a
flag of experts. Model, text, order of the samples and learning rate follow from the recipe and the
seed, so variants are compared seed by seed.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from benchmarks.shared.benchmark import Flag
from benchmarks.shared.zero_json import zero_json
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp.errors import InputError
from zeropp.settings.sections import Zeropp

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
# With the factor, updates are as large as Adam's.
MUON = (
    "--optimizer muon --muon-nesterov --muon-momentum 0.95 --muon-coefficient-type simple "
    "--muon-extra-scale-factor 0.2"
)
# Held-out losses of the usual flags after 400 steps of seed 9 with the learning rates 1.5e-3, 3e-3,
# 6e-3 and 1.2e-2: AdamW 5.544, 5.494, 5.997 and 6.268, Muon 5.430, 5.250, 5.180 and 5.197.
MUON_LR = 6e-3
OUTER = Zeropp()  # with the default outer_lr and outer_momentum
# Flags of benchmarks for the rates that some variants have, which are fields of a recipe.
RATES = (
    Flag("--muon-lr", MUON_LR, "learning rate of variants with Muon"),
    Flag("--local-lr", help="that of AdamW under local SGD", type=float),
    Flag("--outer-lr", OUTER.outer_lr, "of variants with local SGD"),
    Flag("--outer-momentum", OUTER.outer_momentum, "likewise"),
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs from the baseline: settings by a name of `zero_json`, flags, further keys."""

    meaning: str
    zero: str = "zero3"
    flags: str = ""
    zeropp: Mapping[str, object] = field(default_factory=dict)

    @property
    def has_muon(self) -> bool:
        """Whether matrices are Muon's."""
        return self.flags == MUON

    @property
    def steps_alone(self) -> bool:
        """Whether it is local SGD: each node is a replica that steps alone."""
        return "sync_every" in self.zeropp


PLAIN = {  # those that run unless others are named: a name of `zero_json`, and what it means
    "qwz": "weights in INT8",
    "hpz": "a secondary copy of the weights in each node",
    "qgz": "gradients in INT8 then INT4",
    "zeropp": "all three",
    "zeropp-4-4": "all three, gradients in INT4 in both hops",
    "code-steps": "all three, weights as changes of their codes, all coded",
    "code-steps-int3": "the same, gradients in INT8 then INT3",
}
USUAL = (BASELINE, *PLAIN)
MUON_BLOCKS = {  # where Muon orthogonalizes
    "muon": ("rows of a node", {}),
    "muon-whole": ("whole matrices", {"muon_blocks": "whole"}),
    "muon-every-5": ("rows of a node, in every fifth step whole", {"muon_whole_every": 5}),
}
LOCAL = {  # local SGD: ending of the name, and keys
    **{
        f"{interval}{ending}": {"sync_every": interval, **rounding}
        for interval in (10, 30, 100)
        for ending, rounding in (
            ("", {"sync_bits": 4}),
            ("-feedback", {"sync_bits": 4, "sync_feedback": True}),
            ("-fp32", {"sync_bits": 32}),
        )
    },
    "30-overlap": {"sync_every": 30, "sync_fragments": 5, "sync_delay": 2},
}
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        BASELINE: Variant(meaning="ZeRO stage 3, nothing quantized"),
        **{name: Variant(meaning=meaning, zero=name) for name, meaning in PLAIN.items()},
        "int8-tokens": Variant(
            meaning="nothing quantized but rows that cross nodes towards experts, in INT8",
            flags="--moe-dispatch-bits 8",
        ),
        **{
            name + ending: Variant(meaning=f"Muon, {where}", flags=MUON, zeropp=keys, zero=zero)
            for name, (where, keys) in MUON_BLOCKS.items()
            for ending, zero in (
                ("", "zero3"),
                ("-code-steps", "code-steps"),
                ("-code-steps-int3", "code-steps-int3"),
            )
        },
        **{
            f"{prefix}local-{ending}": Variant(
                meaning=f"local SGD with {optimizer}; {keys}",
                flags=flags,
                zeropp={**keys, "muon_blocks": "whole"},
            )
            for prefix, optimizer, flags in (("", "AdamW", ""), ("muon-", "Muon", MUON))
            for ending, keys in LOCAL.items()
        },
    }
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all runs share; `flags` are those of pretrain_gpt.py, the last of a kind counts.

    eval_interval: iterations. eval_samples: held-out samples, the same at every evaluation.
    lr_spike: the first of `SPIKE` iterations whose learning rate is multiplied; 0 for none.
    muon_lr: the learning rate of variants with Muon. local_lr: that of AdamW under local SGD, if it
    is another one there; outer_lr, outer_momentum: of its outer steps.
    """

    steps: int
    ranks: int
    ranks_per_node: int
    dtype: str
    eval_interval: int
    eval_samples: int
    flags: str = FLAGS
    lr_spike: int = 0
    muon_lr: float = MUON_LR
    local_lr: float | None = None
    outer_lr: float = OUTER.outer_lr
    outer_momentum: float = OUTER.outer_momentum

    def config(self, variant: str, seed: int) -> Config:
        """The configuration of one run; raises InputError for wrong flags."""
        round_samples = EVAL_MICRO_BATCH * self.ranks
        if self.eval_samples < 1 or self.eval_samples % round_samples:
            raise InputError(
                f"--eval-samples {self.eval_samples}: expected a multiple of {round_samples} "
                f"({EVAL_MICRO_BATCH} on each of {self.ranks} ranks)"
            )
        words = f"{self.flags} {VARIANTS[variant].flags}".split()
        chosen = VARIANTS[variant]
        rate = self.muon_lr if chosen.has_muon else self.local_lr if chosen.steps_alone else None
        words += [] if rate is None else ["--lr", str(rate)]
        words += ["--train-iters", str(self.steps), "--seed", str(seed)]
        words += [] if self.dtype == "fp32" else [f"--{self.dtype}"]
        words += ["--eval-interval", str(self.steps + 1)]  # the benchmark evaluates by itself
        words += ["--log-interval", str(self.steps)]  # one interval: bytes of all steps
        config = parse([*words, "--deepspeed_config", json.dumps(self.zero(variant))], self.ranks)
        rounds = -(-self.eval_samples // config.batch.global_batch_size)
        evaluation = dataclasses.replace(config.evaluation, eval_iters=rounds)
        return dataclasses.replace(config, evaluation=evaluation)

    def of(self, name: str) -> dict:
        """What concerns a variant, by the names of fields."""
        variant = VARIANTS[name]
        other = set() if variant.has_muon else {"muon_lr"}
        other |= {"local_lr"} if variant.has_muon or not variant.steps_alone else set()
        other |= set() if variant.steps_alone else {"outer_lr", "outer_momentum"}
        return {key: value for key, value in asdict(self).items() if key not in other}

    def zero(self, name: str) -> dict:
        """DeepSpeed's JSON of a variant."""
        variant = VARIANTS[name]
        content = zero_json(variant.zero, self.ranks_per_node)
        content["zeropp"] |= variant.zeropp
        if variant.steps_alone:
            outer = {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
            content["zeropp"] |= outer
        return content
