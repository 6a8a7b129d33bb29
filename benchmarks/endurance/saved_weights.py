"""The weights in a checkpoint, read without a model."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from zeropp.checkpoint.state_tensors import MODEL


def saved_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of a checkpoint by name, whole."""
    reader = dcp.FileSystemReader(path)
    described = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(each.size)
        for name, each in described.items()
        if name.startswith(MODEL) and each.properties.dtype == torch.float32
    }
    dcp.load(weights, storage_reader=reader, no_dist=True)
    return weights
