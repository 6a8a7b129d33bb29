"""Bytes of model state that a rank holds at each ZeRO stage, counted, beside the formula.

Every storage used by a tensor that was made after the model's construction began counts once, so
nothing that the engine keeps is overlooked. They are counted when a step holds most outside a
forward or backward pass: after the last but one micro-batch, with Adam's moments allocated.
docs/memory.md explains each number and derives the formula.
"""

import dataclasses
import gc
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from benchmarks.shared.training_setup import CLIP, DTYPES, TrainingSetup, largest_of_ranks
from megatron_zpp.data.loader import Batch
from megatron_zpp.recipe.capability import capabilities_of
from megatron_zpp.recipe.model import build_model, build_optimizer
from zeropp import Sharding, optimizer_step
from zeropp.fsdp_adapter.uncalled_units import StandIn

STAGES = (0, 1, 2, 3)
FP32, MOMENTS = 4, 8  # bytes of a weight or gradient in fp32; of Adam's two moments
PAUSE_SECONDS, EQUAL_COUNTS = 0.05, 4  # between two counts; how many must be equal


def formula(stage: int, num_ranks: int, dtype: str) -> float:
    """Bytes per parameter that our engine holds (docs/memory.md)."""
    compute = DTYPES[dtype].itemsize
    shards = (FP32 + MOMENTS) / num_ranks
    if num_ranks == 1 and dtype == "fp32":  # nothing is wrapped
        return FP32 + FP32 + MOMENTS
    gradients = compute if num_ranks == 1 else FP32  # of the first of two micro-batches
    if stage == 0:
        return FP32 + MOMENTS + compute + gradients
    if stage == 1:
        return shards + compute + gradients
    if stage == 2:
        return shards + FP32 / num_ranks + compute
    return shards + FP32 / num_ranks


def paper(stage: int, num_ranks: int, dtype: str) -> float:
    """Bytes per parameter by Rajbhandari et al. 2020, section 5 (fp32: by the same rule)."""
    width = DTYPES[dtype].itemsize
    weights = width / num_ranks if stage == 3 else width
    gradients = width / num_ranks if stage >= 2 else width
    state = MOMENTS if dtype == "fp32" else FP32 + MOMENTS  # K = 12 with weights in 16 bit
    return weights + gradients + (state / num_ranks if stage >= 1 else state)


def count_stages(setup: TrainingSetup, dtype: str) -> list[dict]:
    """One row per stage for the ranks of this process group, of the rank with most bytes."""
    return [_row(dataclasses.replace(setup, dtype=dtype, stage=stage)) for stage in STAGES]


def live_storages() -> dict[int, int]:
    """Bytes of every storage that a live tensor of this process uses, by address."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors = [each for each in tensors if not isinstance(each, FakeTensor | StandIn)]  # no memory
    return _storages(tensors + [tensor.grad for tensor in tensors if tensor.is_leaf])


def _row(setup: TrainingSetup) -> dict:
    steps = setup.steps(2)
    gc.collect()
    gc.freeze()  # from here on gc.get_objects() and gc.collect() leave out what is alive now
    sharding = build_model(setup.config, setup.vocab_size, setup.ranks, apex=None)
    own = capabilities_of(setup.config, setup.ranks)
    optimizer = build_optimizer(sharding, setup.config.optimizer, setup.ranks.device, None, own)
    _backward(sharding, steps[0], until=len(steps[0]))
    optimizer_step(optimizer, sharding, clip_grad=CLIP)
    _backward(sharding, steps[1], until=len(steps[1]) - 1)
    _settle()
    held = _by_purpose(sharding.model, optimizer)
    parameters = sharding.model.num_parameters()
    measured = largest_of_ranks(sum(held.values()), setup.ranks.device) / parameters
    predicted = formula(sharding.stage, sharding.num_ranks, setup.dtype)
    return {
        "ranks": sharding.num_ranks,
        "stage": sharding.stage,
        "dtype": setup.dtype,
        "parameters": parameters,
        "bytes_per_parameter": {name: held[name] / parameters for name in held},
        "measured": measured,
        "formula": predicted,
        "difference": measured / predicted - 1,
        "paper": paper(sharding.stage, sharding.num_ranks, setup.dtype),
    }


def _backward(sharding: Sharding, batches: list[Batch], until: int) -> None:
    """Gradients of the first `until` micro-batches of a step."""
    for index, batch in enumerate(batches[:until]):
        with sharding.micro_step(last=index == len(batches) - 1):
            loss = sharding.model(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
            (loss / len(batches)).backward()


def _settle() -> None:
    """Wait for gloo's threads, which free a collective's buffers shortly after it ends."""
    counts: list[int] = []
    while len(counts) < EQUAL_COUNTS or len(set(counts[-EQUAL_COUNTS:])) > 1:
        time.sleep(PAUSE_SECONDS)
        counts.append(sum(live_storages().values()))


def _by_purpose(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank's live storages by purpose.

    "other" is what only the engine refers to: with 16-bit weights, unsharded gradients in fp32.
    """
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    used = list(model.parameters())  # the gathered weights, while they are gathered
    purposes = {
        "weights": owned,
        "Adam's moments": states,
        "gathered weights": used,
        "gradients": [tensor.grad for tensor in owned + used],
    }
    counted: dict[int, int] = {}
    held = {}
    for name, tensors in purposes.items():
        sizes = _storages(tensors)
        held[name] = sum(size for address, size in sizes.items() if address not in counted)
        counted |= sizes
    held["other"] = sum(live_storages().values()) - sum(counted.values())
    return held


@torch.no_grad()
def _storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Bytes of the storages of this rank's parts of tensors, by address."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local is not None and local.device.type != "meta":
            storage = local.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
    return sizes
