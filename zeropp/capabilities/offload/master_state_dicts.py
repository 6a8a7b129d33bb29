"""Lets the state dicts of a model with an offloaded optimizer hold the fp32 master weights.

The model's own parameters are rounded to 16 bit, and those of a delayed update are one step behind.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp.fsdp_adapter import WholeParameter, local_part
from zeropp.sharding.shard import part_for_rank


def use_in_state_dicts(model: nn.Module, optimizer: Any) -> None:
    """Let `state_dict` return `optimizer.masters`, and `load_state_dict` load into them exactly.

    With `keep_vars`, `state_dict` returns the model's own parameters. To be called after the
    optimizer has registered what it does when a state is loaded.
    """
    loading: dict[nn.Parameter, torch.Tensor] = {}

    def show(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        masters = optimizer.masters
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            is_shown = value is None or value is parameter or isinstance(parameter, WholeParameter)
            if parameter in masters and not is_shown:
                state[prefix + name] = masters[parameter].detach()

    def remember(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if value is not None and not isinstance(parameter, WholeParameter):
                loading[parameter] = value

    def load_exactly(module: nn.Module, _: Any) -> None:
        masters = optimizer.masters
        for parameter in module.parameters(recurse=False):
            value = loading.pop(parameter, None)
            if value is not None and parameter in masters and value.shape == parameter.shape:
                master = masters[parameter]
                with torch.no_grad():
                    if isinstance(master, DTensor) and not isinstance(value, DTensor):
                        value = part_for_rank(value, master)
                    local_part(master).copy_(local_part(value))

    for module in model.modules():
        module.register_state_dict_post_hook(show)
        module.register_load_state_dict_pre_hook(remember)
        module.register_load_state_dict_post_hook(load_exactly)
