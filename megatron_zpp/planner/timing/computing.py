"""How long a GPU computes the passes of a layer, of the head, and an update.

A pass is a sum of matrix products, attention and element-wise kernels; the first two run at a share
of the peak rate, the last at one of the memory rate. A backward pass is two forward passes.

Ranks that share a model's work divide it: T tensor ranks the channels and the vocabulary, C context
ranks the tokens, and with sequence parallelism T ranks also the rows of the stream.
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

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)


def layer_passes(config: Config, layer: int, place: int, itemsize: int, rates: Rates) -> Passes:
    """Return the passes of a micro-batch through a layer, `place` from the first of its stage.

    itemsize: bytes of an activation.
    """
    model, recompute, parallel = config.model, config.recompute, config.parallel
    constants = hardware_table()["layers"]
    tokens, tensor = _tokens(config), parallel.tensor_model_parallel_size
    products = tokens * projections(model) / tensor / rates.products_at(_width(config))
    scores = tokens * CAUSAL_SHARE * core_attention(model, model.windows[layer]) / tensor
    rate = rates.products_at(model.hidden_size)
    attention = scores / (constants["attention_share"] * rate)
    rows = tensor if parallel.sequence_parallel else 1
    streamed = constants["stream_bytes"] * model.hidden_size / rows
    fused = constants["compiled" if config.training.compile else "eager"]
    mlp_bytes = fused["gated_mlp_bytes"] if model.is_gated else constants["mlp_bytes"]
    streamed += mlp_bytes * model.ffn_size / tensor
    if model.position_embedding_type == "rope" and not model.layers_without_rope[layer]:
        keys = 1 if model.multi_latent_attention else model.kv_heads
        turned = (model.num_attention_heads + keys) * model.rotary_channels / tensor
        streamed += fused["rotary_bytes"] * turned
    elementwise = tokens * streamed * itemsize / BYTES_16_BIT / rates.memory
    forward = products + attention + elementwise
    again = 0.0
    if recompute.recompute_granularity == "full" and place < recomputed_layers(model, recompute):
        again = forward
    elif recompute.recompute_granularity == "selective":
        again = attention
    return Passes(forward, BACKWARD * forward + again)


def head_passes(config: Config, vocab_size: int, itemsize: int, rates: Rates) -> Passes:
    """Return the passes of a micro-batch through the output layer and the loss."""
    model = config.model
    tensor = config.parallel.tensor_model_parallel_size
    entries = _tokens(config) * model.padded_vocab_size(vocab_size) / tensor
    products = 2 * entries * model.hidden_size / rates.products_at(_width(config))
    loss_bytes = hardware_table()["layers"]["loss_bytes"] * itemsize / BYTES_16_BIT
    forward = products + entries * loss_bytes / rates.memory
    return Passes(forward, BACKWARD * forward)


def update_seconds(elements: int, rates: Rates) -> float:
    """Return the seconds of Adam's update of so many weights of this rank."""
    return elements * hardware_table()["kernels"]["adam"] / rates.memory


def _tokens(config: Config) -> float:
    """Return a rank's tokens of a micro-batch."""
    tokens = config.batch.micro_batch_size * config.model.seq_length
    return tokens / config.parallel.context_parallel_size


def _width(config: Config) -> float:
    """Return the width whose products lose as much of the peak rate as those of tensor ranks.

    What a product loses is taken to be the sum of what its two sides lose, each inversely to its
    length; tensor ranks divide one of them: the harmonic mean of H and H/T.
    """
    return 2 * config.model.hidden_size / (1 + config.parallel.tensor_model_parallel_size)
