"""Bytes of model state that a rank holds at each ZeRO stage, counted, beside the formula.

Counted is every storage that a tensor made since before the model was built uses, once each:
nothing the engine keeps can hide. The moment is the fullest of a step outside a forward or backward
pass: after the last but one micro-batch, with Adam's moments in place. What each number stands for,
and the derivation of the formula, is in docs/memory.md.
"""

import gc
import time
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from benchmarks.shared.setting import CLIP, DTYPES, Setting
from megatron_zpp.data.loader import Batch
from megatron_zpp.parallel.recipe import build_model, build_optimizer
from zeropp import Sharding, optimizer_step

STAGES = (0, 1, 2, 3)
FULL, MOMENTS = 4, 8  # bytes of a weight or gradient in fp32; of Adam's two moments
PAUSE_SECONDS, SAME_COUNTS = 0.05, 4  # between two counts; how many must be equal


def formula(stage: int, num_ranks: int, dtype: str) -> float:
    """Bytes per parameter that our engine holds (docs/memory.md)."""
    compute = DTYPES[dtype].itemsize
    shards = (FULL + MOMENTS) / num_ranks
    if num_ranks == 1 and dtype == "fp32":  # nothing is wrapped
        return FULL + FULL + MOMENTS
    if stage == 0:
        return FULL + MOMENTS + compute + FULL
    if stage == 1:
        return shards + compute + FULL
    if stage == 2:
        return shards + FULL / num_ranks + compute
    return shards + FULL / num_ranks


def paper(stage: int, num_ranks: int, dtype: str) -> float:
    """Bytes per parameter by Rajbhandari et al. 2020, section 5 (fp32: by the same rule)."""
    width = DTYPES[dtype].itemsize
    weights = width / num_ranks if stage == 3 else width
    gradients = width / num_ranks if stage >= 2 else width
    state = MOMENTS if dtype == "fp32" else FULL + MOMENTS  # K = 12 with weights in 16 bit
    return weights + gradients + (state / num_ranks if stage >= 1 else state)


def count_stages(setting: Setting, dtype: str) -> list[dict]:
    """One row per stage for the ranks of this process group; the largest rank counts."""
    return [_row(setting.of(dtype=dtype, stage=stage)) for stage in STAGES]


def live_storages() -> dict[int, int]:
    """Bytes of every storage that a live tensor of this process uses, by address."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    tensors = [one for one in tensors if not isinstance(one, FakeTensor)]  # have no memory
    return _storages(tensors + [one.grad for one in tensors if one.is_leaf])


def _row(setting: Setting) -> dict:
    batches = setting.batches(2)
    gc.collect()
    gc.freeze()  # what lives now is left out of every list of objects from here on
    sharding = build_model(setting.config, setting.vocab_size, setting.ranks, apex=None)
    optimizer = build_optimizer(sharding, setting.config, setting.ranks.device, apex=None)
    steps = [batches[: len(batches) // 2], batches[len(batches) // 2 :]]
    _backward(sharding, steps[0], until=len(steps[0]))
    optimizer_step(optimizer, sharding, clip_grad=CLIP)
    _backward(sharding, steps[1], until=len(steps[1]) - 1)
    _settle()
    held = _by_purpose(sharding.model, optimizer)
    gc.unfreeze()
    parameters = sharding.model.num_parameters()
    measured = setting.largest(sum(held.values())) / parameters
    predicted = formula(sharding.stage, sharding.num_ranks, setting.dtype)
    return {
        "ranks": sharding.num_ranks,
        "stage": sharding.stage,
        "dtype": setting.dtype,
        "parameters": parameters,
        "bytes_per_parameter": {name: held[name] / parameters for name in held},
        "measured": measured,
        "formula": predicted,
        "difference": measured / predicted - 1,
        "paper": paper(sharding.stage, sharding.num_ranks, setting.dtype),
    }


def _backward(sharding: Sharding, batches: list[Batch], until: int) -> None:
    """Gradients of the first `until` micro-batches of a step."""
    for index, batch in enumerate(batches[:until]):
        with sharding.micro_step(last=index == len(batches) - 1):
            loss = sharding.model(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
            (loss / len(batches)).backward()


def _settle() -> None:
    """Wait for the threads of gloo, which let go of a collective's buffers just after its end."""
    counts: list[int] = []
    while len(counts) < SAME_COUNTS or len(set(counts[-SAME_COUNTS:])) > 1:
        time.sleep(PAUSE_SECONDS)
        counts.append(sum(live_storages().values()))


def _by_purpose(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank's live storages by what they are for; what is not found is the rest.

    The rest is what the engine keeps to itself: with 16-bit weights, whole gradients in fp32.
    """
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    used = list(model.parameters())  # the gathered weights, while they are gathered
    purposes = {
        "weights": owned,
        "Adam's moments": states,
        "gathered weights": used,
        "gradients": [tensor.grad for tensor in owned + used],
    }
    seen: dict[int, int] = {}
    held = {}
    for name, tensors in purposes.items():
        found = {a: size for a, size in _storages(tensors).items() if a not in seen}
        held[name] = sum(found.values())
        seen |= found
    held["other"] = sum(live_storages().values()) - sum(seen.values())
    return held


def _storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    storages = (local.untyped_storage() for local in _local_parts(tensors))
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


@torch.no_grad()
def _local_parts(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            yield tensor.to_local()
        elif tensor is not None and tensor.device.type != "meta":
            yield tensor
