"""A spike is a loss far above those before it, by the measure of how they vary."""

import pytest
import torch

from megatron_zpp.monitor.loss_watch import LossWatch


def test_a_spike_is_far_above_what_the_losses_vary():
    watch, generator = LossWatch(), torch.Generator().manual_seed(1)
    noise = 0.05 * torch.randn(300, generator=generator)
    falling = [5 - 0.01 * step + float(noise[step]) for step in range(300)]
    assert [watch.mean_below(loss) for loss in falling] == [None] * 300
    mean = watch.mean_below(4.5)
    assert mean == pytest.approx(sum(falling[-100:]) / 100)
    early = LossWatch()
    assert [early.mean_below(loss) for loss in [2.0] * 19 + [9.0]] == [None] * 20
