"""The ZeRO++ settings that benchmarks compare, by name, as DeepSpeed's JSON.

| name                | weights travel as                | gradients travel as               |
|---------------------|----------------------------------|-----------------------------------|
| `zero3`             | bf16                             | bf16, two hops                    |
| `qwz`               | INT8                             | as `zero3`                        |
| `hpz`               | bf16; across nodes once          | as `zero3`                        |
| `qgz`               | as `zero3`                       | INT8 in a node, INT4 across nodes |
| `zeropp`            | INT8; across nodes once          | as `qgz`                          |
| `zeropp-4-4`        | as `zeropp`                      | INT4 on both hops                 |
| `zeropp-once`       | as `zeropp`, the root once       | as `qgz`, once per step           |
| `code-steps`        | changes of codes, coded          | as `qgz`, coded                   |
| `code-steps-int3`   | as `code-steps`                  | INT8 in a node, INT3 across, coded |
| `code-steps-auto`   | as `code-steps`, coded where that is faster | likewise           |
| `no-hpz`            | INT8                             | as `qgz`                          |
| `zero3-once`        | bf16, the root once              | as `zero3`, once per step         |
| `zero1`             | bf16, once per step              | as `zero3`, once per step         |
| `lora-zero3`        | as `zero3`                       | as `zero3`                        |
| `mixz`              | INT8, frozen ones as stored      | as `zero3`                        |
| `mixz-hpz`          | the same; frozen ones once       | as `zero3`                        |

Where training is in fp32, so are numbers that are not quantized.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType

COMPONENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "zero3": (),
        "qwz": ("qwz",),
        "hpz": ("hpz",),
        "qgz": ("qgz",),
        "zeropp": ("qwz", "hpz", "qgz"),
        "zeropp-4-4": ("qwz", "hpz", "qgz-4-4"),
        "zeropp-once": ("qwz", "hpz", "qgz", "once"),
        "code-steps": ("qwz", "hpz", "qgz", "steps"),
        "code-steps-int3": ("qwz", "hpz", "qgz-8-3", "steps"),
        "code-steps-auto": ("qwz", "hpz", "qgz", "steps", "auto"),
        "no-hpz": ("qwz", "qgz"),
        "zero3-once": ("once",),
        "zero1": ("stage-1",),
        "lora-zero3": (),
        "mixz": ("mixz",),
        "mixz-hpz": ("mixz", "hpz"),
    }
)


KEYS = {  # of zero_optimization
    "qwz": {"zero_quantized_weights": True},
    "qgz": {"zero_quantized_gradients": True},
    "qgz-4-4": {"zero_quantized_gradients": True},
    "qgz-8-3": {"zero_quantized_gradients": True},
    "mixz": {"zero_quantized_nontrainable_weights": True},
    "stage-1": {"stage": 1},
}
OWN_KEYS = {  # of zeropp; bits within a node, across nodes
    "qgz": {"gradient_bits": [8, 4]},
    "qgz-4-4": {"gradient_bits": [4, 4]},
    "qgz-8-3": {"gradient_bits": [8, 3]},
    "once": {"reduce_gradients_once": True},
    "steps": {"weight_steps": True, "code_messages": True},
    "auto": {"code_messages": "auto"},
}


def zero_json(name: str, ranks_per_node: int) -> dict:
    """The JSON of one of `COMPONENTS`, on nodes of so many ranks."""
    zero: dict = {"stage": 3}
    zeropp: dict = {"ranks_per_node": ranks_per_node, "code_messages": False}
    for component in COMPONENTS[name]:
        zero |= KEYS.get(component, {})
        zeropp |= OWN_KEYS.get(component, {})
        if component == "hpz":
            zero["zero_hpz_partition_size"] = ranks_per_node
    return {"zero_optimization": zero, "zeropp": zeropp}


def json_flag(content: Mapping) -> str:
    """A JSON as a flag of pretrain_gpt.py, without spaces."""
    return f"--deepspeed-config {json.dumps(content, separators=(',', ':'))}"
