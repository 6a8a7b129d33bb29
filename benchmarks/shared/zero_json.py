"""The ZeRO++ settings that benchmarks compare, by name, as DeepSpeed's JSON: `zero_json.toml`."""

import json
from collections.abc import Mapping
from types import MappingProxyType

from zeropp.settings import read_toml

_TABLE = MappingProxyType(read_toml(__package__, "zero_json.toml"))
OURS, LORA = tuple(_TABLE["names"]), tuple(_TABLE["names_of_lora"])


def zero_json(name: str, ranks_per_node: int) -> dict:
    """The JSON of one of `OURS` or `LORA`, on nodes of `ranks_per_node` ranks."""
    zero: dict = {"stage": 3}
    zeropp: dict = {"ranks_per_node": ranks_per_node, "code_messages": False}
    for part in (_TABLE["names"] | _TABLE["names_of_lora"])[name]:
        zero |= _TABLE["parts"][part].get("zero_optimization", {})
        zeropp |= _TABLE["parts"][part].get("zeropp", {})
        if part == "hpz":
            zero["zero_hpz_partition_size"] = ranks_per_node
    return {"zero_optimization": zero, "zeropp": zeropp}


def json_flag(content: Mapping) -> str:
    """A JSON as a flag of pretrain_gpt.py, without spaces."""
    return f"--deepspeed-config {json.dumps(content, separators=(',', ':'))}"
