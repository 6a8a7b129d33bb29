"""The keys of local SGD in the JSON, which of them contradict each other, and who refuses them."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from zeropp.settings.json_keys import JsonSection, NoEffect, key, needs, phase_values
from zeropp.settings.schema import Rule

_NEEDS_INTERVAL = NoEffect(
    "it needs zeropp.sync_every above 1", when=lambda c: c.zeropp.sync_every == 1
)


@dataclass(frozen=True, kw_only=True)
class Replication(JsonSection):
    """Local SGD, or DiLoCo, where an outer optimizer takes the step of all replicas.

    `sync_every`: each node trains a replica independently, and they synchronize every n steps; the
    interval may grow with the steps. `sync_bits`: bits per element of the pseudo-gradient.
    `sync_feedback`: error feedback (null: with two bits). `outer_lr` and `outer_momentum` (of
    Nesterov): of the outer optimizer. `sync_on_host`: the global parameters are on the host.
    `sync_fragments`: into how many parts the weights are divided, which are synchronized one after
    another in the course of `sync_every` steps. `sync_delay`: for how many steps training goes on
    while a part is on its way, and `sync_mixing` is the share of what these have changed (the merge
    weight of Streaming DiLoCo). `sync_store`: HOST:PORT of a store that `zeropp --keep_store`
    keeps: each replica is a launch of its own, and may join or leave (elastic); a run begins when
    there are `sync_nodes`, for which the global batch is.
    """

    path: ClassVar[str] = "zeropp"

    sync_every: int = key(1, minimum=1, by_phase=True)
    sync_bits: int = key(4, choices=(2, 4, 8, 32), no_effect=_NEEDS_INTERVAL)
    sync_feedback: bool | None = key(None, no_effect=_NEEDS_INTERVAL)
    sync_fragments: int = key(1, minimum=1, no_effect=_NEEDS_INTERVAL)
    sync_delay: int = key(0, minimum=0, no_effect=_NEEDS_INTERVAL)
    sync_mixing: float = key(0.5, minimum=0, below=1, no_effect=needs("zeropp.sync_delay"))
    outer_lr: float = key(0.7, above=0, no_effect=_NEEDS_INTERVAL)
    outer_momentum: float = key(0.5, minimum=0, below=1, no_effect=_NEEDS_INTERVAL)
    sync_on_host: bool = key(False, no_effect=_NEEDS_INTERVAL)
    sync_store: str | None = key(None, no_effect=_NEEDS_INTERVAL)
    sync_nodes: int | None = key(None, minimum=1, no_effect=needs("zeropp.sync_store"))


KEYS = (Replication,)
RULES = (
    Rule(
        ("zeropp.sync_delay", "zeropp.sync_every"),
        lambda delay, every: delay >= min((n for n in phase_values(every) if n > 1), default=inf),
        "{} and {}: an exchange has to end before the next one of the same weights: set a shorter "
        "delay",
    ),
    Rule(
        ("zeropp.sync_store", "zeropp.sync_delay"),
        lambda store, delay: store is not None and delay > 0,
        "{} and {}: an exchange may have to be repeated with fewer nodes, from the weights with "
        "which it began: leave the delay out",
    ),
    Rule(
        ("zeropp.sync_store", "zeropp.sync_nodes"),
        lambda store, nodes: store is not None and nodes is None,
        "{} and {}: say with how many nodes a run begins, for which the global batch is",
    ),
)
# For which ranks take each step together, as under `zeropp.initialize`.
INDEPENDENT_STEPS = {
    "zeropp.sync_every": "For replicas that train independently, shard the model over the ranks of "
    "a node and call zeropp.local_steps, or leave it out",
}
