"""fp32 weights that an optimizer keeps beside the model's 16-bit ones, checked against these.

The check also notices state that was taken for that of other parameters.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from megatron_zpp.interchange.foreign.tensor_files import REMEDY, LazyTensor
from zeropp.errors import InputError, first_few


def with_main_weights(
    weights: Mapping[str, LazyTensor], main: Mapping[str, LazyTensor], where: str
) -> dict[str, LazyTensor]:
    """Return the weights, with the optimizer's fp32 ones where it has them.

    Reading one raises InputError if it is not the model's weight but for rounding. Raises
    InputError for names and shapes that the model does not have.
    """
    unfamiliar = [
        name
        for name, tensor in main.items()
        if name not in weights or weights[name].fact.shape != tensor.fact.shape
    ]
    if unfamiliar:
        raise InputError(
            f"{where}: {first_few(unfamiliar)}: the optimizer's fp32 weights are not those of the "
            f"model: files of another checkpoint are among them{REMEDY}"
        )
    checked = {
        name: LazyTensor(tensor.fact, partial(_read, name, tensor, weights[name], where))
        for name, tensor in main.items()
    }
    return {**weights, **checked}


def _read(name: str, main: LazyTensor, weight: LazyTensor, where: str) -> Tensor:
    values, stored = main.read(), weight.read()
    # Within one unit in the last place: programs round ties differently.
    facts = torch.finfo(stored.dtype)
    if not torch.allclose(
        values.to(stored.dtype).float(),
        stored.float(),
        rtol=facts.eps,
        atol=facts.tiny * facts.eps,
        equal_nan=True,
    ):
        raise InputError(
            f"{where}: {name} is not what the optimizer keeps of it in fp32: its state is of "
            f"another iteration, or lies in an order that is not known here{REMEDY}"
        )
    return values
