"""What follows from where documents end in a sample: loss mask, positions, segments of attention.

All of them look at the input tokens [b, S], as megatron-core does: the end-of-document token
belongs to the document it ends, and the next token begins another one.
"""

import torch
from torch import Tensor


def shown(text: Tensor) -> Tensor:
    """The ids of a text int64 [b, S + 1] in which those without loss are complements (~id)."""
    return torch.where(text < 0, ~text, text)


def loss_mask(tokens: Tensor, eod: int, eod_mask_loss: bool) -> Tensor:
    """1, and with `eod_mask_loss` 0 where the input is the end of a document; float32 [b, S]."""
    if eod_mask_loss:
        return (tokens != eod).float()
    return torch.ones_like(tokens, dtype=torch.float32)


def document_edges(tokens: Tensor, eod: int) -> Tensor:
    """Where documents begin in the rows laid end to end, and the end; int32 [n + 1].

    Every row begins a document, and so does every token after an end of document.
    """
    begins = torch.ones(tokens.shape, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    starts = begins.flatten().nonzero().flatten()
    return torch.cat((starts, torch.tensor([tokens.numel()]))).to(torch.int32)


def position_ids(tokens: Tensor, eod: int, reset_position_ids: bool) -> Tensor:
    """0, 1, 2 ..., with `reset_position_ids` from 0 again after each end; int64 [b, S]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    if reset_position_ids:
        # A document starts after each end; every token counts from the latest start.
        starts = torch.zeros_like(positions)
        starts[:, 1:] = positions[:, 1:] * (tokens[:, :-1] == eod)
        positions = positions - starts.cummax(dim=1).values
    return positions
