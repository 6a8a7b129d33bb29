"""What crosses on the way of tokens to experts and back, as the forecast of a step has it.

Each choice of K of the E experts is as likely as any other, which balance gives on average; m nodes
split them.
"""

from collections.abc import Iterator
from itertools import chain
from math import comb

import torch

from megatron_zpp.capabilities.experts.axis import ExpertAxis
from megatron_zpp.capabilities.experts.relay import COUNT_BYTES, copy_bytes
from megatron_zpp.model.part import Part
from megatron_zpp.recipe.activation_forecast import Forecast, in_layers
from zeropp.wire import EXCHANGE, Message


def token_messages(forecast: Forecast, stage: Part, axis: ExpertAxis) -> Iterator[Message]:
    """Yield the moves of tokens to experts and back, if all experts get equally many.

    Before each way there crosses how many tokens each expert gets.
    """
    model, group = forecast.config, axis.group
    own_rows = forecast.tokens // (forecast.ranks.tensor_size if forecast.splits_rows else 1)
    rows = own_rows * model.moe_router_topk // group.size
    layers, again, back = (
        sum(model.moe_layers[layer] for layer in each)
        for each in (
            stage.layers,
            chain(*forecast.checkpoints(stage)),
            forecast.layers_with_gradients(stage),
        )
    )
    row_bytes = rows * model.hidden_size * forecast.width
    numbers = model.num_experts // axis.size * torch.int64.itemsize
    yield from in_layers(group, (EXCHANGE,), row_bytes, 2 * layers, 2 * (back + again))
    yield from in_layers(group, (EXCHANGE,), numbers, layers, again)
    if axis.across is None:
        return
    # To relays on other nodes, and sums back, on average.
    group, num_nodes = axis.across, axis.across.size
    each = copies_across_nodes(model.num_experts, model.moe_router_topk, num_nodes)
    copies = own_rows * each / (num_nodes - 1)  # to each other node
    messages = copy_bytes(model, forecast.compute_dtype, num_nodes, axis.bits)
    for sizes, times in zip(messages, ((layers, again), (0, back)), strict=True):
        for size in sizes:
            yield from in_layers(group, (EXCHANGE,), round(copies * size), *times)
    yield from in_layers(group, (EXCHANGE,), COUNT_BYTES, layers, again)


def copies_across_nodes(num_experts: int, topk: int, num_nodes: int) -> float:
    """Return how many other nodes have experts of a token: (m - 1) (1 - C(E - E/m, K) / C(E, K)).

    The fraction is how often all K experts are among those of the other nodes. A router that
    chooses groups of experts first needs fewer.
    """
    elsewhere = comb(num_experts - num_experts // num_nodes, topk)
    return (num_nodes - 1) * (1 - elsewhere / comb(num_experts, topk))
