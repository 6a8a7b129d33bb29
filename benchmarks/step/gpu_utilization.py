"""How full a device is: what step times mean in FLOP/s, MFU and tokens, as numbers and a table."""

import statistics
from collections.abc import Mapping, Sequence


def speeds(seconds: Sequence[float], found: Mapping) -> dict[str, float]:
    """Of steps that took `seconds` the median, and what it means at a size."""
    median = statistics.median(seconds)
    tokens = found["tokens_per_step"] / median
    flops = tokens * found["flops_per_token"]
    return {
        "median": median,
        "tokens_per_s": tokens,
        "flops_per_s": flops,
        "mfu": flops / found["product_rate"],
    }


def show_size(found: Mapping) -> None:
    """Print the table of one size."""
    shape = ", ".join(f"{name} {value}" for name, value in found["shape"].items())
    print(f"\n{found['size']}: {shape}" + ("" if found["compiled"] else "; ours not compiled"))
    if "product_rate" in found:
        print(f"{found['parameters']:,} parameters, {found['flops_per_token'] / 1e9:.4g} GFLOP per "
              f"token; bf16 products: {found['product_rate'] / 1e12:.4g} TFLOP/s")  # fmt: skip
    if found["ours"] or found["peers"]:
        print(f"  {'':36} {'ms/step':>9} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} "
              f"{'peak GB':>8}  its time / ours, quartiles")  # fmt: skip
    if found["ours"]:
        print(_row(found["ours"]))
    for peer in found["peers"]:
        low, high = peer["quartiles"]
        print(f"{_row(peer)}  {peer['ratio']:.3f}, {low:.3f} to {high:.3f}")
    for peer in found["peers"]:
        print(f"  {peer['name']}: verified, "
              + ", ".join(f"{what} within {value:.1e}" for what, value in peer["verified"].items()))
    for why in found["failed"]:
        print(f"  failed: {why}")
    for why in found["not_run"]:
        print(f"  not run: {why}")


def _row(one: Mapping) -> str:
    peak = f"{one['peak_bytes'] / 1e9:8.2f}" if one["peak_bytes"] else f"{'':8}"
    return (
        f"  {one['name']:36} {1e3 * one['median']:9.2f} {one['tokens_per_s']:10.0f} "
        f"{one['flops_per_s'] / 1e12:8.4g} {one['mfu']:6.1%} {peak}"
    )
