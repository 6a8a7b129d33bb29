"""Peaks of memory that real steps of ranks have, beside those that the planner foretells."""

from benchmarks.memory.dry_run import predict_and_measure
from megatron_zpp.planner.estimate import Estimate

LEEWAY = 0.06  # of the peak; issue and docs promise 0.1


def assert_peak_is_foretold(flags: str) -> Estimate | None:
    """Train with `flags` on these ranks; rank 0 compares their peak with its estimate.

    It returns the estimate, the others None. Where ranks gather blocks (or their codes) one after
    the other, a busy CPU may have one more of them in flight than the estimate has.
    """
    predicted, measured = predict_and_measure(flags)
    if predicted is None:
        return None
    foretold, plan = predicted.host_bytes, predicted.plan
    by_block = plan.num_ranks > 1 and (plan.stage > 0 or plan.stores_frozen)
    gathered = block_bytes(predicted) if by_block else 0
    numbers = f"{foretold:,} bytes foretold, {measured:,} measured, {gathered:,} of a block"
    assert (1 - LEEWAY) * measured - gathered <= foretold <= (1 + LEEWAY) * measured, numbers
    return predicted


def block_bytes(predicted: Estimate) -> int:
    """Return the bytes of the weights of the largest unit below the root when they are gathered."""
    plan = predicted.plan
    sizes = (
        unit.num_shards * sum(spec.elements for spec in unit.specs)
        for unit in plan.units
        if not unit.is_root
    )
    return plan.compute_dtype.itemsize * max(sizes)
