"""What step times mean in FLOP/s, MFU and tokens per second, as numbers and as a table."""

import statistics
from collections.abc import Mapping, Sequence


def speeds(seconds: Sequence[float], size: Mapping) -> dict[str, float]:
    """The median of step times in seconds, and the rates it means for a size of `gpu_train`."""
    median = statistics.median(seconds)
    tokens = size["tokens_per_step"] / median
    flops = tokens * size["flops_per_token"]
    return {
        "median": median,
        "tokens_per_s": tokens,
        "flops_per_s": flops,
        "mfu": flops / size["product_rate"],
    }


def show_size(size: Mapping) -> None:
    """Print the table of one size."""
    shape = ", ".join(f"{name} {value}" for name, value in size["shape"].items())
    print(f"\n{size['size']}: {shape}" + ("" if size["compiled"] else "; ours not compiled"))
    if "product_rate" in size:
        print(
            f"{size['parameters']:,} parameters, {size['flops_per_token'] / 1e9:.4g} GFLOP per "
            f"token; bf16 products: {size['product_rate'] / 1e12:.4g} TFLOP/s"
        )
    if size["ours"] or size["peers"]:
        print(
            f"  {'':36} {'ms/step':>9} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} "
            f"{'peak GB':>8}  its time / ours, quartiles"
        )
    if size["ours"]:
        print(_row(size["ours"]))
    for peer in size["peers"]:
        low, high = peer["quartiles"]
        print(f"{_row(peer)}  {peer['ratio']:.3f}, {low:.3f} to {high:.3f}")
    for peer in size["peers"]:
        differences = [f"{what} within {value:.1e}" for what, value in peer["verified"].items()]
        print(f"  {peer['name']}: verified, {', '.join(differences)}")
    for reason in size["failed"]:
        print(f"  failed: {reason}")
    for reason in size["not_run"]:
        print(f"  not run: {reason}")


def _row(loop: Mapping) -> str:
    peak = f"{loop['peak_bytes'] / 1e9:8.2f}" if loop["peak_bytes"] else f"{'':8}"
    return (
        f"  {loop['name']:36} {1e3 * loop['median']:9.2f} {loop['tokens_per_s']:10.0f} "
        f"{loop['flops_per_s'] / 1e12:8.4g} {loop['mfu']:6.1%} {peak}"
    )
