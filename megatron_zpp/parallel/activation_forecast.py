"""The bytes that a step will send along the axes beside the data axis, computed from shapes.

What is sent is counted where it is sent (`peers.py`), and tests compare the two.
"""

from collections import Counter
from itertools import groupby
from math import gcd

from torch import nn

from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.peers import AXES, Peers
from megatron_zpp.parallel.pipeline import Pipeline
from megatron_zpp.parallel.pipeline_stage import Stage
from megatron_zpp.parallel.tensor_parallel import partial_parameters
from megatron_zpp.settings.config import Config
from zeropp import Sharding
from zeropp.optim.step import local_part
from zeropp.wire.traffic import Traffic

FP32_BYTES = 4


def activation_traffic(
    config: Config, ranks: Ranks, sharding: Sharding, num_micro_batches: int
) -> dict[tuple[str, str], int]:
    """Return the bytes that this rank will send in a step, by (axis, hop)."""
    forecast = Forecast(config, ranks, sharding)
    total: Counter[tuple[str, str]] = Counter()
    for stage in forecast.stages:
        total.update(forecast.micro_batch(stage))
    total = Counter({key: num_micro_batches * sent for key, sent in total.items()})
    total.update(forecast.gradients())
    return dict(total)


class Forecast:
    """What this rank sends its peers, in terms of the model's sizes."""

    def __init__(self, config: Config, ranks: Ranks, sharding: Sharding) -> None:
        self.config, self.ranks, self.model = config, ranks, sharding.model
        model = config.model
        self.width = sharding.compute_dtype.itemsize
        self.residual_width = FP32_BYTES if model.fp32_residual_connection else self.width
        self.tokens = config.batch.micro_batch_size * model.seq_length // ranks.context_size
        self.elements = self.tokens * model.hidden_size  # of the residual stream
        whole = Stage(index=0, count=1, layers=range(model.num_layers), model=self.model)
        self.stages = self.model.stages if isinstance(self.model, Pipeline) else (whole,)

    def micro_batch(self, stage: Stage) -> dict[tuple[str, str], int]:
        """Return what a micro-batch sends on its way through a stage and back."""
        ledger = Traffic(AXES)
        if self.ranks.tensor_size > 1:
            self._tensor(stage, self.ranks.tensor_peers.with_ledger(ledger))
        if self.ranks.context_size > 1:
            self._context(stage, self.ranks.context_peers.with_ledger(ledger))
        if self.ranks.pipeline_size > 1:
            self._pipeline(stage, ledger)
        return ledger.sent

    def gradients(self) -> dict[tuple[str, str], int]:
        """Return what is sent once per step: gradients that ranks of an axis have parts of."""
        ledger = Traffic(AXES)
        if self.ranks.tensor_size > 1:
            splits_rows = self.config.parallel.sequence_parallel
            partial = partial_parameters(self.model, splits_rows)
            elements = sum(local_part(each).numel() for each in partial)
            self._sum(self.ranks.tensor_peers.with_ledger(ledger), elements, FP32_BYTES)
        if isinstance(self.model, Pipeline) and self.model.ties_ends:
            elements = local_part(self.model.tokens.weight).numel()
            self._sum(self.ranks.ends_of_pipeline.with_ledger(ledger), elements, FP32_BYTES)
        return ledger.sent

    def _tensor(self, stage: Stage, peers: Peers) -> None:
        """Count the moves of `tensor_parallel.py`: 2 into and 2 out of the layers of a block."""
        splits_rows = self.config.parallel.sequence_parallel
        into = out = 2 * len(stage.layers)
        back_into, _, back_out = self._moves_back(stage)
        again_into, again_out = self._recomputed_moves(stage)
        if stage.is_first:
            self._sum(peers, self.elements, self.width)
        if stage.is_last:
            into, back_into = into + 1, back_into + 1
            peers.count_reduce(self.tokens * FP32_BYTES)
            self._sum(peers, 2 * self.tokens, FP32_BYTES)
        for _ in range(self._norms_of_heads(stage)):
            self._sum(peers, self.tokens, FP32_BYTES)
        row = self.elements * self.width // peers.size
        if not splits_rows:
            for _ in range(out + back_into + again_out):
                self._sum(peers, self.elements, self.width)
            return
        peers.count_gather((into + back_out + again_into) * row)
        peers.count_exchange((out + back_into + again_out) * row)
        if stage.is_first and self.model.tokens.weight.requires_grad:
            peers.count_gather(self.elements * self.residual_width // peers.size)

    def _norms_of_heads(self, stage: Stage) -> int:
        """Return how many normalizations of all heads sum squares, or their gradients."""
        model = self.config.model
        if not (model.qk_layernorm and model.qk_layernorm_across_heads):
            return 0
        _, back, _ = self._moves_back(stage)
        return 2 * (len(stage.layers) + back + self._recomputed(stage))

    def _context(self, stage: Stage, peers: Peers) -> None:
        """Count the moves of `context_parallel.py`, of queries, keys, values and the result."""
        model, recompute = self.config.model, self.config.recompute
        heads, kv_heads = (
            count // self.ranks.tensor_size for count in (model.num_attention_heads, model.kv_heads)
        )
        _, back, _ = self._moves_back(stage)
        if self.config.parallel.cp_comm_type == "allgather":
            again = self._recomputed(stage)
            if recompute.recompute_granularity == "selective":
                again = len(stage.layers)
            num_bytes = self.tokens * 2 * kv_heads * model.head_dim * self.width
            peers.count_gather((len(stage.layers) + again) * num_bytes)
            peers.count_exchange(back * num_bytes)
            return
        kv_heads *= peers.size // gcd(peers.size, kv_heads)
        moves = len(stage.layers) + back + self._recomputed(stage)
        all_heads = moves * (2 * heads + 2 * kv_heads)
        if recompute.recompute_granularity == "selective":  # up to the attention itself
            all_heads += len(stage.layers) * (heads + 2 * kv_heads)
        elements = self.tokens * model.head_dim * all_heads
        peers.count_exchange(elements * self.width // peers.size)

    def _pipeline(self, stage: Stage, ledger: Traffic) -> None:
        """Count the activations sent onward, and their gradients sent back."""
        splits_rows = self.config.parallel.sequence_parallel
        rows = self.ranks.tensor_size if splits_rows else 1
        links = self.model.links
        for is_end, link in (
            (stage.is_last, links.activations_out), (stage.is_first, links.gradients_out)
        ):  # fmt: skip
            if not is_end:
                num_bytes = self.elements // rows * self.residual_width
                link.peers.with_ledger(ledger).count_exchange(num_bytes)

    def _sum(self, peers: Peers, elements: int, width: int) -> None:
        """Count a sum on all ranks: an exchange of its parts, and a gather of their sums."""
        part = -(-elements // peers.size) * width
        peers.count_exchange(part)
        peers.count_gather(part)

    def _moves_back(self, stage: Stage) -> tuple[int, int, int]:
        """Return how many gradients are moved: at entries of layers, inside attention, at exits.

        None is needed where all that comes before is frozen.
        """
        entries = inside = exits = 0
        is_needed = not stage.is_first or stage.model.tokens.weight.requires_grad
        for layer in stage.layers:
            attention, mlp = stage.model.blocks[layer].attention, stage.model.blocks[layer].mlp
            entries += is_needed
            is_needed = is_needed or _is_trained(attention.qkv)
            inside += is_needed
            is_needed = is_needed or _is_trained(attention)
            exits += is_needed
            entries += is_needed
            is_needed = is_needed or _is_trained(mlp)
            exits += is_needed
        return entries, inside, exits

    def _recomputed(self, stage: Stage) -> int:
        """Return how many of a stage's layers are computed twice."""
        return sum(map(len, self._checkpoints(stage)))

    def _checkpoints(self, stage: Stage) -> list[list[int]]:
        """Return the layers that are computed twice, grouped as they are computed again at once."""
        recompute = self.config.recompute
        if recompute.recompute_granularity != "full":
            return []
        layers, size = stage.layers, recompute.recompute_num_layers
        if recompute.recompute_method == "block":
            layers, size = layers[:size], 1
        groups = [list(group) for _, group in groupby(layers, key=lambda layer: layer // size)]
        trained = (layer for layer in stage.layers if _is_trained(stage.model.blocks[layer]))
        first = next(trained, stage.layers.stop) if stage.is_first else stage.layers.start
        return [group for group in groups if group[-1] >= first]

    def _recomputed_moves(self, stage: Stage) -> tuple[int, int]:
        """Return how many moves into and out of layers are made again in backward.

        PyTorch ends a recomputation when it has all that backward needs. That is before the last
        sum, unless dropout or a normalization follows it.
        """
        checkpoints, moves = self._checkpoints(stage), 2 * self._recomputed(stage)
        model = self.config.model
        is_last = model.hidden_dropout == 0 and model.norm_placement == "pre"
        not_again = len(checkpoints) if is_last else 0
        return moves, moves - not_again


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
