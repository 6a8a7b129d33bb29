"""Which should cross nodes: the weights of experts and their gradients, or tokens.

Where the ranks of a node split experts, weights and gradients cross; where those of all nodes do,
tokens cross instead. The fewer tokens a step has, the more that pays. Both are what the forecast of
the run says, with the bits of its ZeRO settings.
"""

from dataclasses import dataclass, replace
from math import gcd

from megatron_zpp.planner.candidates import Candidate
from megatron_zpp.planner.parts.meta_model import MetaModel
from megatron_zpp.planner.run_forecast import RunForecast
from megatron_zpp.planner.timing.hardware import GIB
from zeropp.sharding import first_bytes
from zeropp.wire import Nodes

ACROSS = "across_nodes"
MIB = 2**20
IN_JSON = (
    "settings in_node across weights_bytes rows_bytes tokens threshold_tokens first_copy_bytes"
).split()


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What a node sends to others in a step, in two ways to split experts; bytes.

    settings: the name of the ZeRO settings. in_node, across: the ranks that split them. weights: of
    experts and their gradients, which cross only in the first way. rows: of tokens, which cross
    only in the second. tokens: of a node in a step. first_copy: frozen weights, which cross
    once in a run in the first way.
    """

    settings: str
    in_node: int
    across: int
    weights: float
    rows: float
    tokens: float
    first_copy: float

    @property
    def threshold_tokens(self) -> float:
        """The tokens of a node and step below which it sends less if tokens cross."""
        return self.tokens * self.weights / self.rows

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the numbers, for programs."""
        numbers = {name: getattr(self, name.removesuffix("_bytes")) for name in IN_JSON}
        return {"experts_or_tokens": numbers}

    def __str__(self) -> str:
        rows, across = _size(self.rows), f"the {self.across} ranks of all nodes"
        if not self.weights > 0:
            text = f"With {self.settings}, nothing of the experts crosses nodes in a step"
            if self.first_copy:
                size = _size(self.first_copy)
                text += f": frozen weights do once in a run, {size} from each node"
            return f"{text}. If {across} split the experts, {rows} of tokens would."
        should = "tokens" if self.tokens < self.threshold_tokens else "weights"
        return (
            f"With {self.settings}, a node sends others {_size(self.weights)} of experts' weights "
            f"and gradients in a step, or {rows} of tokens if {across} split the experts: with "
            f"{self.tokens:,.0f} tokens of a node and step, {should} should cross (tokens below "
            f"{self.threshold_tokens:,.0f})."
        )


def crossing_of(candidate: Candidate, nodes: Nodes, model: MetaModel) -> Crossing | None:
    """Return the two ways for the other settings of `candidate`; None where there are not two.

    There must be experts, and they cannot be split over all nodes if their number is not a multiple
    of the ranks, or where a stage of a pipeline is on one node.
    """
    if not candidate.config.model.has_experts:
        return None
    config, parallel = candidate.config, candidate.config.parallel
    stage_ranks = nodes.num_ranks // parallel.pipeline_model_parallel_size
    num_experts, tensor = config.model.num_experts, parallel.tensor_model_parallel_size
    in_node, across = gcd(num_experts, stage_ranks, nodes.ranks_per_node), stage_ranks
    is_split = stage_ranks > nodes.ranks_per_node and num_experts % across == 0
    if not is_split or in_node % tensor or config.zero.stage == 0:
        return None
    sent, first_copy = [], 0.0
    for size in (in_node, across):
        its_parallel = replace(parallel, expert_model_parallel_size=size)
        its_config = replace(config, parallel=its_parallel)
        its = RunForecast.of(its_config, model.vocab_size, nodes, is_cpu=False, model=model)
        by_purpose, places = its.sent, its.places
        rows = by_purpose["expert", ACROSS]
        own = sum(by_purpose[key] for key in by_purpose if key[1] == ACROSS)
        sent.append((own - rows, rows))
        if size == in_node:
            num_places = sum(count for _, count in places)
            first_copy = sum(count * first_bytes(run.plan) for run, count in places) / num_places
    (weights, _), (other_weights, rows) = sent
    tokens = config.schedules.batch_size.final * config.model.seq_length / nodes.count
    return Crossing(
        settings=candidate.settings.name,
        in_node=in_node,
        across=across,
        weights=weights - other_weights,
        rows=rows,
        tokens=tokens,
        first_copy=first_copy,
    )


def _size(num_bytes: float) -> str:
    number, unit = (num_bytes / GIB, "GiB") if num_bytes >= GIB else (num_bytes / MIB, "MiB")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
