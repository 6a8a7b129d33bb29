"""Loss mask, positions and document edges of a sample, from the tokens that end documents.

All functions use the input tokens [b, S], as megatron-core does: an end-of-document token belongs
to the document that it ends, and the next token begins another document.
"""

import torch
from torch import Tensor


def restore_hidden_ids(text: Tensor) -> Tensor:
    """Return the token ids of `text` int64 [b, S + 1], where ids without loss are stored as ~id."""
    return torch.where(text < 0, ~text, text)


def loss_mask(tokens: Tensor, eod: int, eod_mask_loss: bool) -> Tensor:
    """Return ones, with `eod_mask_loss` zero where the input ends a document; float32 [b, S]."""
    if eod_mask_loss:
        return (tokens != eod).float()
    return torch.ones_like(tokens, dtype=torch.float32)


def document_edges(tokens: Tensor, eod: int) -> Tensor:
    """Return the offsets at which documents begin, and the number of tokens; int32 [n + 1].

    The rows are concatenated. Every row begins a document, and so does every token after `eod`.
    """
    is_first = torch.ones(tokens.shape, dtype=torch.bool)
    is_first[:, 1:] = tokens[:, :-1] == eod
    starts = is_first.flatten().nonzero().flatten()
    return torch.cat((starts, torch.tensor([tokens.numel()]))).to(torch.int32)


def position_ids(tokens: Tensor, eod: int, reset_position_ids: bool) -> Tensor:
    """Return 0, 1, 2, ... for each row; int64 [b, S].

    With `reset_position_ids` the positions of every document start at 0.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    if reset_position_ids:
        # The position at which the document of each token begins.
        starts = torch.zeros_like(positions)
        starts[:, 1:] = positions[:, 1:] * (tokens[:, :-1] == eod)
        positions = positions - starts.cummax(dim=1).values
    return positions
