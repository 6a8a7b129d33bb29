"""The bytes of model state: what is counted, and the formula beside the paper's."""

import gc

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.memory.model_state import formula, live_storages, paper


def test_storages_are_counted_once_and_none_is_overlooked():
    gc.collect()  # or what other tests left goes in between
    before = sum(live_storages().values())
    hidden = torch.zeros(1000, requires_grad=True)
    views = [hidden[:10], hidden.view(10, 100)]
    hidden.sum().backward()  # a gradient of as many elements
    with FakeTensorMode():
        fake = torch.zeros(1000)
    assert sum(live_storages().values()) - before == 8000
    del views, fake


@pytest.mark.parametrize("count", [2, 4, 64])
def test_formula_is_the_papers_but_for_what_the_engine_keeps_twice(count):
    extra = {"bf16": (2, 2, 2 / count, 0), "fp32": (4, 4 / count, 4 / count, 0)}
    for dtype, differences in extra.items():
        for stage, difference in enumerate(differences):
            excess = formula(stage, count, dtype) - paper(stage, count, dtype)
            assert excess == pytest.approx(difference)
