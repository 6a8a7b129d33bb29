"""`deepspeed.runtime.zero.partition_parameters`: what transformers needs to build a model.

DeepSpeed's `zero.Init` changes the dtype of what tensor constructors return, and transformers
exempts `torch.arange` from that by replacing the wrapper below. Ours leaves dtypes alone, so the
wrapper does nothing.
"""

from collections.abc import Callable

import torch

from zeropp.deepspeed.parameter_values import ZeroParamStatus
from zeropp.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(constructor: Callable, *_: object) -> Callable:
    """Return the constructor as it is."""
    return constructor
