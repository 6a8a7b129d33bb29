"""What Megatron's lines of the log say of experts (`FIELDS`), and short ones (`SHORT_FIELDS`)."""

from collections.abc import Mapping

# The share of a layer's tokens that its busiest expert has, and the rows that the experts of the
# busiest rank compute, where 1 is the mean over the ranks of its stage.
BUSIEST_EXPERT, BUSIEST_RANK = "experts/busiest expert", "experts/busiest rank"


def fields(numbers: Mapping[str, float]) -> list[str]:
    """Return the losses that balance experts, as Megatron-LM writes them, and the largest loads."""
    if BUSIEST_EXPERT not in numbers:
        return []
    losses = {name: x for name, x in numbers.items() if "/" not in name}
    return [
        *(f"{name}: {value:.6E}" for name, value in losses.items()),
        f"busiest expert: {numbers[BUSIEST_EXPERT]:.2%}",
        f"busiest rank: {numbers[BUSIEST_RANK]:.3f}",
    ]


def short_fields(numbers: Mapping[str, float]) -> list[str]:
    """Return the share of the busiest expert, and the load of the busiest rank, whose mean is 1."""
    if BUSIEST_EXPERT not in numbers:
        return []
    return [f"busiest {numbers[BUSIEST_EXPERT]:.0%}, {numbers[BUSIEST_RANK]:.2f}x"]


FIELDS, SHORT_FIELDS = (fields,), (short_fields,)
