"""The keys of incremental weight updates in the JSON, and which of them contradict each other."""

from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from zeropp.settings.json_keys import JsonSection, key, needs
from zeropp.settings.placement import Placed
from zeropp.settings.schema import Rule, requires

STEPS, _CHECK_INTERVAL = "zeropp.weight_steps", "zeropp.weight_step_check_interval"


@dataclass(frozen=True, kw_only=True)
class IncrementalUpdates(JsonSection):
    """`weight_steps`: hpZ's copies are brought up to date after an optimizer's step, by what
    changes in their codes; after every `weight_step_check_interval` of a unit's messages they are
    compared (0: never).
    """

    path: ClassVar[str] = "zeropp"

    weight_steps: bool = key(False)
    # A comparison takes less time than a step, which has at most one message of a unit: every 1000
    # messages it costs less than 0.1%. Where latency counts: it is one collective more, of 8 bytes,
    # beside the five or more that a step has for a unit, 1/5. Where memory counts: its sum reads
    # and writes 6 bytes for each code that a rank keeps, where a step has 20 for each of these
    # weights (codes, 16-bit values and fp32 gradients, written and read), 3/10. Where computing
    # counts: the host waits for the sums, so that at worst no gather in forward is hidden by it,
    # 1/3 of a step. All of these together are 0.83 of a step.
    weight_step_check_interval: int = key(1000, minimum=0, no_effect=needs(STEPS))


class Updating(Placed, JsonSection):
    """What the configuration says of these keys."""

    updates_copies = property(attrgetter(STEPS))


KEYS = (IncrementalUpdates, Updating)
RULES = (
    requires(
        STEPS,
        "zero_optimization.zero_quantized_weights",
        "{} and {}: incremental updates change INT8 codes, so they need quantized weights",
    ),
    Rule(
        (STEPS, "zeropp.weight_bits"),
        lambda steps, bits: steps and bits != 8,
        "{} and {}: incremental updates change INT8 codes, so they need 8 bits",
    ),
    Rule(
        (STEPS, "zero_optimization.zero_hpz_partition_size"),
        lambda steps, size: steps and size == 1,
        "{} and {}: incremental updates change the copies that nodes keep, so they need hpZ with "
        "the ranks of a node as the partition",
    ),
)
ATTACHABLE = (STEPS, _CHECK_INTERVAL)  # keys that `zeropp.attach` honours
ACROSS_NODES = (STEPS,)  # switches that concern only what nodes send each other in a step
