"""Which keys of the JSON contradict each other."""

from zeropp.exports import CAPABILITIES, declared
from zeropp.settings.schema import Rule, one_of, requires

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ZERO = "zero_optimization."
_STAGE = _ZERO + "stage"
_QUANTIZED_WEIGHTS = _ZERO + "zero_quantized_weights"
_HPZ = _ZERO + "zero_hpz_partition_size"

RULES = (
    one_of("fp16.enabled", "bf16.enabled", message="{}: only one of them can be true"),
    Rule(
        (_HPZ, _STAGE),
        lambda size, stage: size > 1 and stage != 3,
        "{} and {}: hpZ keeps a second copy of gathered weights, so it needs stage 3",
    ),
    *(
        requires(name, _STAGE, f"{{}} and {{}}: {why}; it needs stage 1, 2 or 3")
        for name, why in (
            (_QUANTIZED_WEIGHTS, "stage 0 gathers no weights to quantize"),
            (_ZERO + "zero_quantized_gradients", "stage 0 shards no gradients to quantize"),
        )
    ),
    *declared("RULES", CAPABILITIES),
    Rule(
        ("zeropp.gradient_bits",),
        lambda bits: bits[0] == 3,
        "{}: 3 bits are only for the hop between nodes, as in [8, 3]; on both hops they would "
        "cost accuracy",
    ),
    Rule(
        BATCH_KEYS,
        lambda samples, micro, steps: (samples or 0) % ((micro or 1) * (steps or 1)) != 0,
        "{} and {} and {}: the first must be the product of the other two and the number of ranks",
    ),
)
