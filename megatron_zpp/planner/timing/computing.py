"""How long a GPU computes the passes of a layer, of the head, and an update.

A pass is a sum of matrix products, attention and element-wise kernels; the first two run at a share
of the peak rate, the last at one of the memory rate. A backward pass is two forward passes.
"""

from dataclasses import dataclass

from megatron_zpp.model.flops import BACKWARD, core_attention, projections, recomputed_layers
from megatron_zpp.planner.timing.hardware import Rates, hardware_table
from megatron_zpp.settings.config import Config

CAUSAL_SHARE = 0.5  # of the scores, which a causal kernel computes
BYTES_16_BIT = 2


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward pass and of a backward pass, recomputation included."""

    forward: float
    backward: float


def layer_passes(config: Config, layer: int, itemsize: int, rates: Rates) -> Passes:
    """Return the passes of a micro-batch through a layer; itemsize: bytes of an activation."""
    model, recompute = config.model, config.recompute
    constants = hardware_table()["layers"]
    tokens = config.batch.micro_batch_size * model.seq_length
    rate = rates.products_at(model.hidden_size)
    products = tokens * projections(model) / rate
    scores = tokens * CAUSAL_SHARE * core_attention(model, model.windows[layer])
    attention = scores / (constants["attention_share"] * rate)
    streamed = constants["stream_bytes"] * model.hidden_size
    streamed += constants["mlp_bytes"] * model.ffn_size
    elementwise = tokens * streamed * itemsize / BYTES_16_BIT / rates.memory
    forward = products + attention + elementwise
    again = 0.0
    if recompute.recompute_granularity == "full" and layer < recomputed_layers(model, recompute):
        again = forward
    elif recompute.recompute_granularity == "selective":
        again = attention
    return Passes(forward, BACKWARD * forward + again)


def head_passes(config: Config, vocab_size: int, itemsize: int, rates: Rates) -> Passes:
    """Return the passes of a micro-batch through the output layer and the loss."""
    model = config.model
    tokens = config.batch.micro_batch_size * model.seq_length
    entries = tokens * model.padded_vocab_size(vocab_size)
    products = 2 * entries * model.hidden_size / rates.products_at(model.hidden_size)
    loss_bytes = hardware_table()["layers"]["loss_bytes"] * itemsize / BYTES_16_BIT
    forward = products + entries * loss_bytes / rates.memory
    return Passes(forward, BACKWARD * forward)


def update_seconds(elements: int, rates: Rates) -> float:
    """Return the seconds of Adam's update of so many weights of this rank."""
    return elements * hardware_table()["kernels"]["adam"] / rates.memory
