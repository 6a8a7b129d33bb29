"""Normalization: LayerNorm and RMSNorm, whose weights are gains or gains minus 1, if any."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.part import TORCH_NORMS, NormClasses, Part
from megatron_zpp.model.tensor_parallel import ParallelRMSNorm
from megatron_zpp.parallel.axes import part_of
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part
from zeropp.wire import RankGroup


def make_norm(
    config: ModelConfig,
    size: int | None = None,
    norms: NormClasses = TORCH_NORMS,
    epsilon: float | None = None,
) -> nn.Module:
    """Return a normalization over `size` channels, by default H; it computes in fp32.

    epsilon: added to the variance, by default what the model says.
    """
    size, epsilon = size or config.hidden_size, epsilon or config.layernorm_epsilon
    is_rms = config.normalization == "RMSNorm"
    if config.disable_norm_gain:
        return (nn.RMSNorm if is_rms else nn.LayerNorm)(size, epsilon, elementwise_affine=False)
    if config.disable_norm_bias and not is_rms:
        return nn.LayerNorm(size, epsilon, bias=False)
    classes = {
        ("LayerNorm", False): norms.layer_norm,
        ("RMSNorm", False): norms.rms_norm,
        ("LayerNorm", True): LayerNorm1P,
        ("RMSNorm", True): RMSNorm1P,
    }
    norm_class = classes[config.normalization, config.apply_layernorm_1p]
    return norm_class(size, eps=epsilon)


def norm_of_all_heads(config: ModelConfig, size: int, part: Part) -> nn.Module:
    """Return a normalization over the `size` channels of all heads, which ranks may split."""
    if part.tensor is None:
        return make_norm(config, size, part.norms)
    return ParallelRMSNorm(size, config.layernorm_epsilon, part.tensor)


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `norm(x)` [..., H] in the dtype of the gains, to which an fp32 residual is cast.

    Without gains it is in the dtype of x.
    """
    return norm(x if norm.weight is None else x.to(norm.weight.dtype))


class NormPerHead(nn.Module):
    """A normalization of each head by itself, with gains of its own and without a bias.

    The gains of all heads are one tensor [heads * D], which ranks may split.
    """

    def __init__(self, config: ModelConfig, heads: int, axis: RankGroup | None) -> None:
        super().__init__()
        self.is_rms, self.eps = config.normalization == "RMSNorm", config.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(heads * config.head_dim))
        self.split_dims: dict[str, int] = {}
        if axis is not None:
            self.split_dims["weight"] = 0
            self.weight = part_of(self.weight, 0, axis.size, axis.mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads x [B, S, K, Q, D], of which there are K * Q."""
        normalize = F.rms_norm if self.is_rms else F.layer_norm
        normalized = normalize(x.float(), x.shape[-1:], eps=self.eps)
        return (normalized * local_part(self.weight).float().view(x.shape[2:])).to(x.dtype)


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
