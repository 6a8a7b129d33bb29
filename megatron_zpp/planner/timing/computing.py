"""How long a GPU computes the passes of a layer, of the head, and an update.

A pass is a sum of matrix products, attention and element-wise kernels; the first two run at a share
of the peak rate, the last at one of the memory rate. A backward pass is two forward passes; without
gradients of frozen weights, its products are one.

Ranks that share a model's work divide it: T tensor ranks the channels and the vocabulary, C context
ranks the tokens, and with sequence parallelism T ranks also the rows of the stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_zpp.capabilities.experts.layer import expert_products
from megatron_zpp.model.flops import BACKWARD, core_attention, projections
from megatron_zpp.planner.timing.balanced_stages import LayerSeconds
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


NOTHING = Passes(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Computing:
    """The passes of a micro-batch on GPUs of these rates; itemsize: bytes of an activation."""

    config: Config
    itemsize: int
    rates: Rates

    def layer_passes(self, layer: int, place: int) -> Passes:
        """Return the passes through a layer, `place` from the first of its stage.

        Of experts, only the router and what is done with their rows are included.
        """
        model, parallel, rates = self.config.model, self.config.parallel, self.rates
        constants = hardware_table()["layers"]
        tokens, tensor = self._tokens, parallel.tensor_model_parallel_size
        has_experts = model.moe_layers[layer]
        operations = projections(model, layer)
        ffn_size = model.ffn_size
        if has_experts:
            operations -= expert_products(model)
            ffn_size = model.moe_shared_expert_intermediate_size or 0
        products = tokens * operations / tensor / rates.products_at(self._width)
        scores = tokens * CAUSAL_SHARE * core_attention(model, model.windows[layer]) / tensor
        rate = rates.products_at(model.hidden_size)
        attention = scores / (constants["attention_share"] * rate)
        rows = tensor if parallel.sequence_parallel else 1
        streamed = constants["stream_bytes"] * model.hidden_size / rows
        if has_experts:
            row_bytes = model.moe_router_topk * constants["expert_row_bytes"]
            streamed += row_bytes * model.hidden_size / rows
        streamed += self._mlp_bytes * ffn_size / tensor
        if model.position_embedding_type == "rope" and not model.layers_without_rope[layer]:
            keys = 1 if model.multi_latent_attention else model.kv_heads
            turned = (model.num_attention_heads + keys) * model.rotary_channels / tensor
            streamed += self._fused["rotary_bytes"] * turned
        elementwise = tokens * streamed * self.itemsize / BYTES_16_BIT / rates.memory
        return self._passes(place, products, attention, elementwise)

    def expert_passes(self, place: int, size: int) -> Passes:
        """Return the passes through the experts of a layer, which `size` ranks split.

        Routing is balanced. Grouped products take at least the time in which a rank's weights are
        read; what they lose of the peak rate is that of their two widths.
        """
        model, parallel, rates = self.config.model, self.config.parallel, self.rates
        tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        tokens, width = self._tokens / tensor, model.expert_ffn_size
        rate = rates.products_at(mean_width(model.hidden_size, width))
        of_each = expert_products(model) / model.moe_router_topk / 2
        read = model.num_experts / size * of_each * BYTES_16_BIT / rates.memory
        products = max(tokens * expert_products(model) / rate, read)
        streamed = model.moe_router_topk * self._mlp_bytes * width
        elementwise = tokens * streamed * self.itemsize / BYTES_16_BIT / rates.memory
        return self._passes(place, products, 0.0, elementwise)

    def unit_passes(self, layer: int, place: int, size: int, *, is_inner: bool) -> Passes:
        """Return the passes through a block, or through its experts if these are the unit.

        They are an inner one where more than one rank, `size`, splits them.
        """
        experts = NOTHING
        if self.config.model.moe_layers[layer] and (is_inner or size == 1):
            experts = self.expert_passes(place, size)
        return experts if is_inner else self.layer_passes(layer, place) + experts

    def head_passes(self, vocab_size: int) -> Passes:
        """Return the passes through the output layer and the loss."""
        model, rates = self.config.model, self.rates
        tensor = self.config.parallel.tensor_model_parallel_size
        entries = self._tokens * model.padded_vocab_size(vocab_size) / tensor
        products = 2 * entries * model.hidden_size / rates.products_at(self._width)
        loss_bytes = hardware_table()["layers"]["loss_bytes"] * self.itemsize / BYTES_16_BIT
        loss = entries * loss_bytes / rates.memory
        return Passes(products + loss, self._backward_products * products + BACKWARD * loss)

    def layer_seconds(self, vocab_size: int) -> LayerSeconds:
        """Return what a micro-batch takes in each layer, and in the output layer with the loss."""
        head, layers = self.head_passes(vocab_size), []
        for layer, has_experts in enumerate(self.config.model.moe_layers):
            passes = self.layer_passes(layer, 0)
            if has_experts:
                passes += self.expert_passes(
                    0, self.config.parallel.expert_model_parallel_size or 1
                )
            layers.append(passes.forward + passes.backward)
        return LayerSeconds(layers=tuple(layers), head=head.forward + head.backward)

    def _passes(self, place: int, products: float, attention: float, elementwise: float) -> Passes:
        """Return passes of which these are the seconds forward."""
        recompute, forward, again = self.config.recompute, products + attention + elementwise, 0.0
        if recompute.recompute_granularity == "full":
            is_first = (
                recompute.recompute_method != "block" or place < recompute.recompute_num_layers
            )
            again = forward if is_first else 0.0
        elif recompute.recompute_granularity == "selective":
            again = attention
        backward = self._backward_products * products + BACKWARD * (attention + elementwise)
        return Passes(forward, backward + again)

    @property
    def _backward_products(self) -> int:
        """The products of a backward pass, in forward passes."""
        return BACKWARD if self.config.trains_all else BACKWARD - 1

    @property
    def _mlp_bytes(self) -> float:
        """What element-wise kernels stream of each channel inside an MLP."""
        if self.config.model.is_gated:
            return self._fused["gated_mlp_bytes"]
        return hardware_table()["layers"]["mlp_bytes"]

    @property
    def _fused(self) -> Mapping[str, float]:
        return hardware_table()["layers"]["compiled" if self.config.training.compile else "eager"]

    @property
    def _tokens(self) -> float:
        """A rank's tokens of a micro-batch."""
        tokens = self.config.batch.micro_batch_size * self.config.model.seq_length
        return tokens / self.config.parallel.context_parallel_size

    @property
    def _width(self) -> float:
        """The width whose products lose as much of the peak rate as those of tensor ranks.

        What a product loses is taken to be the sum of what its two sides lose, each inversely to
        its length; tensor ranks divide one of them: the harmonic mean of H and H/T.
        """
        hidden = self.config.model.hidden_size
        return mean_width(hidden, hidden / self.config.parallel.tensor_model_parallel_size)


def update_seconds(elements: int, rates: Rates) -> float:
    """Return the seconds of Adam's update of so many weights of this rank."""
    return elements * hardware_table()["kernels"]["adam"] / rates.memory


def mean_width(first: float, second: float) -> float:
    """Return the harmonic mean of the two sides of a product."""
    return 2 * first * second / (first + second)
