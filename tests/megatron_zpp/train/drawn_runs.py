"""Flags of random models, dense, with experts or with Muon, and of random ranks that train them."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights, find_checkpoint
from tests.megatron_zpp.train.training_runs import losses, require_equal, run, with_json

Axes = tuple[int, int, int]  # ranks of tensor and context parallelism and of a pipeline
OF_FOUR: tuple[Axes, ...] = (
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4),
    (2, 1, 2), (1, 2, 2),
)  # fmt: skip
OF_TWO: tuple[Axes, ...] = ((1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))
ALL_THREE = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
OF_EXPERTS = ["experts.gate", "experts.input", "experts.output"]
LAYERS = [*OF_EXPERTS, "attention.qkv", "attention.output", "output"]
OPTIONAL = (
    "--swiglu", "--untie-embeddings-and-output-weights", "--disable-bias-linear",
    "--fp32-residual-connection", "--apply-residual-connection-post-layernorm",
    "--reset-attention-mask", "--eod-mask-loss", "--reset-position-ids",
)  # fmt: skip
LLAMA = "--swiglu --disable-bias-linear --position-embedding-type rope --normalization RMSNorm "
BIASED = ("sigmoid", "sqrtsoftplus")  # scores of experts whose router may have a bias


class Drawn:
    """A model of a kind, and the ranks that train it.

    `has_replicas` says whether two ranks compute two micro-batches at once.
    """

    def __init__(
        self,
        seed: int,
        kind: str = "dense",
        sizes: Sequence[Axes] = OF_FOUR,
        scores: Sequence[str] = ("softmax", "softmax", *BIASED),
    ) -> None:
        self.draw = draw = random.Random(seed)
        self.kind, self.scores = kind, scores
        self.tensor, self.context, self.pipe = draw.choice(sizes)
        self.chunks = draw.choice([1, 1, 2]) if self.pipe > 1 else 1
        self.has_replicas = self.tensor * self.context * self.pipe == 1
        self.experts, self.layers = 0, self.pipe * self.chunks * draw.randint(1, 2)
        own = {"dense": self._dense, "experts": self._experts, "muon": self._muon}[kind]()
        words = [
            f"--num-layers {self.layers} --vocab-size {draw.randint(20, 60)} --micro-batch-size 1",
            f"--seq-length {8 * draw.randint(1, 3)} --global-batch-size {4 * draw.randint(1, 2)}",
            "--hidden-dropout 0 --attention-dropout 0 --train-iters 3 --lr 1e-3",
            draw.choice(["", "--clip-grad 0.1", "--clip-grad 0"]),
        ]
        self.model = " ".join([*words, *own]) + " "

    def _dense(self) -> list[str]:
        draw, heads = self.draw, self.draw.choice([4, 8])
        groups = draw.choice([each for each in (1, 2, 4, 8) if heads % each == 0])
        positions = draw.choice(["learned_absolute", "rope", "none"])
        return [
            f"--hidden-size {heads * draw.choice([4, 6])} --position-embedding-type {positions}",
            f"--num-attention-heads {heads} --num-query-groups {groups}",
            f"--ffn-hidden-size {4 * draw.randint(3, 9)}",
            f"--normalization {draw.choice(['LayerNorm', 'RMSNorm'])}",
            *(flag for flag in OPTIONAL if draw.random() < 0.4),
        ]

    def _muon(self) -> list[str]:
        draw = self.draw
        words = [
            f"{LLAMA} --hidden-size {8 * draw.randint(3, 6)} --num-attention-heads 4",
            f"--num-query-groups {draw.choice([1, 2, 4])} --init-method-std 0.1 --lr 1e-2",
            f"--ffn-hidden-size {4 * draw.randint(3, 12)}",
            "--optimizer muon --muon-fp32-matmul-prec highest",
            draw.choice(["", "--muon-nesterov"]) + draw.choice(["", " --muon-no-split-qkv"]),
            draw.choice(["", "--decoupled-lr 3e-3"]),
            f"--muon-scale-mode {draw.choice(['spectral', 'unit_rms_norm', 'shape_scaling'])}",
            f"--muon-extra-scale-factor 0.2 --muon-momentum {draw.choice([0.5, 0.9])}",
        ]
        if draw.random() < 0.4:
            self.experts = 4
            words.append("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12")
        return words

    def _experts(self) -> list[str]:
        draw, topk = self.draw, self.draw.randint(1, 3)
        self.experts, score = draw.choice([4, 8, 8, 12]), draw.choice(self.scores)
        marks = [1] + [draw.randint(0, 1) for _ in range(self.layers - 1)]
        draw.shuffle(marks)
        words = [
            f"{LLAMA} --hidden-size 32 --num-attention-heads 4 --init-method-std 0.2",
            f"--ffn-hidden-size {8 * draw.randint(2, 4)} --num-experts {self.experts}",
            f"--moe-ffn-hidden-size {4 * draw.randint(1, 5)} --untie-embeddings-and-output-weights",
            f"--moe-layer-freq {str(marks).replace(' ', '')} --moe-router-topk {topk}",
            f"--moe-router-score-function {score}",
        ]
        if score == "softmax":
            words.append("--moe-router-pre-softmax" if topk == 1 or draw.random() < 0.5 else "")
        elif draw.random() < 0.7:  # a bias that moves by 100 in a step makes most experts idle
            rate = draw.choice([0.01, 100])
            words.append(f"--moe-router-enable-expert-bias --moe-router-bias-update-rate {rate}")
        if draw.random() < 0.3 and self.experts == 8:
            words.append("--moe-router-num-groups 4 --moe-router-group-topk 2")
            words.append("--moe-router-group-best 2")
        words.append(draw.choice(["", "", "--moe-router-topk-scaling-factor 1.7"]))
        if draw.random() < 0.4:
            words.append(f"--moe-shared-expert-intermediate-size {8 * draw.randint(1, 3)}")
            words.append(draw.choice(["", "--moe-shared-expert-gate"]))
        return words

    def losses_of_experts(self) -> str:
        """Flags of what is computed of the tokens of a micro-batch: losses, and a capacity."""
        draw, words = self.draw, []
        words.append(draw.choice(["", "", "--calculate-per-token-loss --eod-mask-loss"]))
        kinds = draw.choice([(), ("aux_loss",), ("seq_aux_loss",), ("aux_loss", "seq_aux_loss")])
        if kinds:
            words.append(f"--moe-router-load-balancing-type {' '.join(kinds)}")
            words.append(f"--moe-aux-loss-coeff {' '.join(['0.3'] * len(kinds))}")
        words.append(draw.choice(["", "--moe-z-loss-coeff 0.1"]))
        if draw.random() < 0.3 and self.tensor * self.context == 1:
            policy = draw.choice(["probs", "position"])
            words.append(f"--moe-expert-capacity-factor {draw.choice([0.5, 1.0, 1.5])}")
            words.append(f"--moe-token-drop-policy {policy}")
        return " ".join(words) + " "

    def adapters(self, base: Path) -> str:
        """Flags of adapters of layers of a trained model, in `base`; some of experts.

        Every stage of a pipeline has some, as it must train something.
        """
        draw = self.draw
        targets = {draw.choice(OF_EXPERTS), *draw.sample(LAYERS, draw.randint(0, 3))}
        targets |= {"attention.qkv"} if self.pipe > 1 else set()
        return (
            f"--pretrained-checkpoint {base} --lora-rank {draw.choice([1, 3, 4])} "
            f"--lora-target-modules {' '.join(sorted(targets))} "
        )

    def axes(self, num_ranks: int) -> str:
        """The flags of the axes of the ranks that have a replica together."""
        draw = self.draw
        words = [
            f"--tensor-model-parallel-size {self.tensor} --context-parallel-size {self.context}",
            f"--pipeline-model-parallel-size {self.pipe}",
            draw.choice(["", "--recompute-granularity full", "--recompute-granularity selective"]),
        ]
        splits_rows = self.tensor > 1 and draw.random() < 0.6
        if self.context > 1:
            words.append(f"--cp-comm-type {draw.choice(['a2a', 'allgather'])}")
        if self.kind == "muon":  # of whole matrices, as one rank's
            words.append(f"--muon-tp-mode {draw.choice(['duplicated', 'distributed'])}")
        if self.chunks > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.chunks}")
        if self.experts:
            fits = [
                size
                for size in (1, 2, 4)
                if self.experts % size == num_ranks // self.pipe % size == 0
                and (size == 1 or size % self.tensor == 0)
            ]
            size = draw.choice(fits)
            splits_rows |= self.tensor > 1 and size > 1
            words.append(f"--expert-model-parallel-size {size}")
        return " ".join([*words, "--sequence-parallel" if splits_rows else ""])

    def zero(self) -> dict:
        """ZeRO's stage and where the optimizer is."""
        zero: dict = {"stage": self.draw.randint(0, 3)}
        if zero["stage"] and self.draw.random() < 0.3:
            zero["offload_optimizer"] = {"device": "cpu"}
        return zero

    def ranks(self, zero: dict | None = None, **zeropp: object) -> str:
        """The flags of four ranks, a JSON among them."""
        draw, drawn = self.draw, self.zero()
        nodes = [each for each in (1, 2, 4) if each % self.tensor == 0 or each == 1]
        own = {"ranks_per_node": draw.choice(nodes), "reduce_gradients_once": draw.random() < 0.4}
        if drawn["stage"] == 3 and own["ranks_per_node"] > 1 and draw.random() < 0.6:
            drawn["zero_hpz_partition_size"] = own["ranks_per_node"]
        if self.kind == "muon":
            own |= {"muon_blocks": "whole", "reduce_gradients_once": False}
        return f"{self.axes(4)} {with_json(zero or drawn, **own | zeropp)}"


def require_numbers_of_one_rank(
    model: str, ranks: Callable[[], str], folder: Path
) -> tuple[str, str]:
    """Require the losses, norms and buffers of one rank; return the logs of four ranks and of one.

    `ranks` returns the flags of the ranks, perhaps others after the stop.
    """
    expected, log = run(1, f"{model} --save {folder}/one", folder), ""
    end = f"--load {folder}/saved --save {folder}/end"
    for flags in (f"--save {folder}/saved --exit-interval 2", end):
        how = ranks()
        print(model, how)
        log += run(4, f"{model} {how} {flags}", folder)
    require_equal(log, expected)
    require_same_buffers(folder / "end", folder / "one")
    return log, expected


def require_same_buffers(folder: Path, other: Path) -> None:
    """Require the same biases of routers in the newest checkpoints of two folders."""
    own, others = (CheckpointWeights(find_checkpoint(each)) for each in (folder, other))
    for name in own.facts():
        if name.endswith("expert_bias"):
            # Sums of a few steps of one size, up or down.
            torch.testing.assert_close(own.read(name), others.read(name), rtol=1e-6, atol=1e-7)


def require_no_digit_lost(flags: str, folder: Path) -> str:
    """Require the digits of a run without a stop; return the log of the part after it."""
    print(flags)
    straight = losses(run(4, flags, folder))
    first = run(4, f"{flags} --save {folder}/saved --exit-interval 2", folder)
    second = run(4, f"{flags} --load {folder}/saved", folder)
    assert losses(first) + losses(second) == straight != []
    return second
