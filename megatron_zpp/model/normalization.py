"""Normalization: LayerNorm and RMSNorm, whose weights are gains or gains minus 1."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.part import TORCH_NORMS, NormClasses, Part
from megatron_zpp.model.tensor_parallel import ParallelRMSNorm
from megatron_zpp.settings.config import ModelConfig


def make_norm(
    config: ModelConfig,
    size: int | None = None,
    norms: NormClasses = TORCH_NORMS,
    epsilon: float | None = None,
) -> nn.Module:
    """Return a normalization over `size` channels, by default H; it computes in fp32.

    epsilon: added to the variance, by default what the model says.
    """
    classes = {
        ("LayerNorm", False): norms.layer_norm,
        ("RMSNorm", False): norms.rms_norm,
        ("LayerNorm", True): LayerNorm1P,
        ("RMSNorm", True): RMSNorm1P,
    }
    norm_class = classes[config.normalization, config.apply_layernorm_1p]
    return norm_class(size or config.hidden_size, eps=epsilon or config.layernorm_epsilon)


def norm_of_all_heads(config: ModelConfig, size: int, part: Part) -> nn.Module:
    """Return a normalization over the `size` channels of all heads, which ranks may split."""
    if part.tensor is None:
        return make_norm(config, size, part.norms)
    return ParallelRMSNorm(size, config.layernorm_epsilon, part.tensor)


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `norm(x)` [..., H] in the dtype of the gains, to which an fp32 residual is cast."""
    return norm(x.to(norm.weight.dtype))


class LayerNorm1P(nn.LayerNorm):
    """A LayerNorm whose weight is its gain minus 1."""

    def forward(self, x: Tensor) -> Tensor:
        gain, bias = 1 + self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, gain, bias, self.eps).to(x.dtype)


class RMSNorm1P(nn.RMSNorm):
    """An RMSNorm whose weight is its gain minus 1."""

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, gain, self.eps).to(x.dtype)
