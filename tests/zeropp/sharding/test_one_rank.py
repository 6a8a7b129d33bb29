"""One rank in 16 bit: the fp32 sums of a plain loop, to the bit, without copies of its own."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharding.test_random_calls import TYPES, run_sequences
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import shard

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
MOVES = {"copy_", "_to_copy", "clone", "add_", "cat", "chunk_cat", "_chunk_cat"}


class Operations(TorchDispatchMode):
    counts: Counter[str]

    def __torch_dispatch__(self, function, _, arguments=(), options=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*arguments, **(options or {}))


@DTYPES
@ranks(1)
def test_what_a_step_copies(dtype: torch.dtype):
    model = small_model()
    plain = copy.deepcopy(model).to(dtype)
    sharding = shard(model, data_mesh(), zero_config({"stage": 1}, **TYPES[dtype]))
    for count in (1, 2, 3):
        ours, others, sums = Operations(), Operations(), Counter()
        ours.counts, others.counts = Counter(), Counter()
        for index in range(count):
            with ours, sharding.micro_step(last=index == count - 1):
                loss_of(model, tokens_of(index)).backward()
            with others:
                loss_of(plain, tokens_of(index)).backward()
            for name, weight in plain.named_parameters():
                sums[name], weight.grad = sums[name] + weight.grad.float(), None
        for name, weight in model.named_parameters():
            assert torch.equal(weight.grad.to_local(), sums[name]), name
        more, units = ours.counts - others.counts, len(sharding.units)
        assert more["_foreach_copy_"] == units * (1 + count)  # a gather, and each gradient
        assert more["_foreach_add_"] == units * (count - 1)
        assert not MOVES.intersection(more)
        model.zero_grad()


@DTYPES
@ranks(1, timeout=120)
def test_random_calls(dtype: torch.dtype, tmp_path):
    run_sequences(0, dtype, tmp_path)
