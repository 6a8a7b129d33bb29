"""Rotary positions: channels of queries and keys, turned in pairs by angles of their position.

Shapes: B batch, S sequence, K key-value heads, D channels of a head, R of them turned.
"""

import math

import torch
from torch import Tensor

from megatron_zpp.settings.config import ModelConfig

Rotary = tuple[Tensor, Tensor]  # cosines and signed sines, each [B or 1, S, 1, 1, R] in fp32
GLOBAL, LOCAL, NONE = KINDS = 0, 1, 2  # tables of a model, by their index


def rotary_tables(
    config: ModelConfig, positions: Tensor, is_long: bool | Tensor = False
) -> tuple[Rotary | None, ...]:
    """Return the tables of a model with rotary positions for positions int [B or 1, S].

    GLOBAL is that of most layers, LOCAL that of layers with a window if they have a base of their
    own; NONE is None. `is_long`: whether the text is longer than those of LongRoPE's
    first training, as a bool or a tensor of one.
    """
    channels = config.rotary_channels
    frequencies = base_frequencies(channels, config.rotary_base, positions.device)
    scale = 1.0
    if config.use_rope_scaling and config.rope_type != "yarn":
        frequencies = _llama3_frequencies(config, frequencies)
    if config.rotary_seq_len_interpolation_factor > 1:
        frequencies = frequencies / config.rotary_seq_len_interpolation_factor
    if config.rope_type == "yarn":
        frequencies = _yarn_frequencies(config, frequencies)
        scale = config.turned_scale
    if config.longrope_long_factors is not None:
        frequencies = _longrope_frequencies(config, frequencies, is_long)
        scale = config.longrope_attention_factor
    tables: list[Rotary | None] = [rotary_table(positions, frequencies, scale), None, None]
    if config.rotary_base_local is not None:
        local = base_frequencies(channels, config.rotary_base_local, positions.device)
        tables[LOCAL] = rotary_table(positions, local)
    return tuple(tables)


def query_scale(config: ModelConfig, positions: Tensor) -> Tensor | None:
    """Return what Llama 4 and Ministral 3 multiply queries by, [B or 1, S, 1, 1], None for 1.

    It grows with the logarithm of positions int [B or 1, S] in lengths of the first training.
    """
    if config.llama_4_scaling_beta is None:
        return None
    lengths = positions.float().div(config.yarn_original_max_position_embeddings).floor()
    return (1 + config.llama_4_scaling_beta * lengths.log1p())[:, :, None, None]


def base_frequencies(channels: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return the frequencies [R/2] in radians per position (Su et al. 2021), R = `channels`."""
    exponents = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    return 1.0 / base ** (exponents / channels)


def rotary_table(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Rotary:
    """Return cosines and signed sines for `rotate` (halves instead of pairs), times `scale`.

    positions: integers [B or 1, S]; frequencies [R/2]. The sines of the first half of the channels
    are negated.
    """
    angles = positions[:, :, None, None, None].float() * frequencies  # [B, S, 1, 1, R/2]
    cosines, sines = angles.cos(), angles.sin()
    if scale != 1:
        cosines, sines = cosines * scale, sines * scale
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def _yarn_frequencies(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Divide slow frequencies by YaRN's factor (Peng et al. 2023, section 3.2), and keep fast ones.

    Between those that turn `yarn_beta_slow` and `yarn_beta_fast` times in a text of the first
    training, the share of the kept frequency is linear in the channel's number.
    """
    first_length = config.yarn_original_max_position_embeddings

    def channel_of(turns: float) -> float:
        ratio = math.log(first_length / (turns * 2 * math.pi)) / math.log(config.rotary_base)
        return ratio * config.rotary_channels / 2

    fast, slow = channel_of(config.yarn_beta_fast), channel_of(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, config.rotary_channels - 1)
    channels = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    slow_share = ((channels - fast) / max(slow - fast, 0.001)).clamp(0, 1)
    return frequencies * (slow_share / config.rotary_scaling_factor + (1 - slow_share))


def _longrope_frequencies(
    config: ModelConfig, frequencies: Tensor, is_long: bool | Tensor
) -> Tensor:
    """Divide frequencies by LongRoPE's factors (Ding et al. 2024) for short or for long texts."""
    short, long = (
        frequencies.new_tensor(factors)
        for factors in (config.longrope_short_factors, config.longrope_long_factors)
    )
    if isinstance(is_long, Tensor):  # chosen on the device, without waiting for it
        return frequencies / torch.where(is_long, long, short)
    return frequencies / (long if is_long else short)


def _llama3_frequencies(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Scale rotary frequencies [R/2], in radians per position, as Llama 3.1 does.

    Over the text of the first training, frequencies of at most the low factor's turns are divided
    by `rope_scaling_factor`, those of at least the high factor's stay, and those between are
    interpolated.
    """
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    turns = config.rope_scaling_original_positions * frequencies / (2 * math.pi)
    unscaled_share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled_share + (1 - unscaled_share) / config.rope_scaling_factor)


def rotate(x: Tensor, rotary: Rotary, is_interleaved: bool = False) -> Tensor:
    """Rotate channels i and i + R/2 of x [B, S, K, heads, D] as a pair, for i < R/2, in fp32.

    `is_interleaved`: channels 2i and 2i + 1, which become channels i and i + R/2 of the result; as
    both queries and keys are reordered, their products stay the same.
    """
    cosines, sines = rotary
    channels = cosines.shape[-1]
    pairs, rest = x.split((channels, x.shape[-1] - channels), dim=-1)
    pairs = pairs.float()
    if is_interleaved:
        pairs = pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    # Not addcmul: Hugging Face's models round the product before the sum.
    rotated = pairs * cosines + pairs.roll(channels // 2, dims=-1) * sines
    rotated = rotated.to(x.dtype)
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)
