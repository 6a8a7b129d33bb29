"""The dynamic loss scale changes as in Megatron."""

import pytest

from zeropp import InputError, LossScaler
from zeropp.optim.loss_scale import DeepSpeedLossScaler

CLEAN, OVERFLOW = False, True


@pytest.mark.parametrize(
    ("settings", "moves", "scales"),
    [
        (
            {"scale": 1024.0, "window": 3, "hysteresis": 2},
            [OVERFLOW, OVERFLOW, CLEAN, CLEAN, CLEAN, OVERFLOW, OVERFLOW],
            [1024, 512, 512, 512, 1024, 1024, 512],
        ),
        (  # the hysteresis is not restored before the window ends
            {"scale": 64.0, "window": 10, "hysteresis": 2},
            [OVERFLOW, OVERFLOW, CLEAN, OVERFLOW],
            [64, 32, 32, 16],
        ),
        (
            {"scale": 128.0, "dynamic": False, "hysteresis": 1, "window": 1},
            [OVERFLOW, CLEAN, OVERFLOW],
            [128, 128, 128],
        ),
    ],
)
def test_scales_after_each_step(settings, moves, scales):
    scaler, seen = LossScaler(**settings), []
    for overflow in moves:
        scaler.update(overflow)
        seen.append(scaler.scale)
    assert seen == scales


def test_overflow_at_the_smallest_scale_ends_training():
    scaler = LossScaler(scale=2.0, hysteresis=1)
    scaler.update(True)
    assert scaler.scale == 1
    with pytest.raises(InputError, match="smallest loss scale"):
        scaler.update(True)


def test_resuming_from_its_state_changes_nothing():
    moves = [False, True, False, True, True, False, False, False, False]
    straight = LossScaler(scale=256.0, window=3)
    first = LossScaler(scale=256.0, window=3)
    for move in moves[:4]:
        straight.update(move), first.update(move)
    second = LossScaler(scale=1.0, window=3)
    second.load_state_dict(first.state_dict())
    for move in moves[4:]:
        straight.update(move), second.update(move)
    assert second == straight


@pytest.mark.parametrize(
    ("kind", "growing"), [(DeepSpeedLossScaler, [3, 5, 7]), (LossScaler, [2, 4, 6])]
)
def test_each_rule_grows_after_its_own_clean_steps(kind, growing):
    """With a window of 2; DeepSpeed's rule counts the first clean step as number 0."""
    scaler, grown = kind(scale=8.0, window=2), []
    for step in range(1, 8):
        before = scaler.scale
        scaler.update(overflow=False)
        grown += [step] * (scaler.scale == 2 * before)
    assert grown == growing
    scaler.update(overflow=True)  # within the hysteresis
    assert scaler.scale == before * (2 if growing[-1] == 7 else 1)
    after = []
    for step in range(1, 6):
        before = scaler.scale
        scaler.update(overflow=False)
        after += [step] * (scaler.scale == 2 * before)
    assert after == [number for number in growing if number < 6]


def test_clean_steps_restore_the_hysteresis_at_once_if_that_is_asked_for():
    scales = {}
    for consecutive in (False, True):
        scaler = DeepSpeedLossScaler(scale=8.0, window=100, consecutive_hysteresis=consecutive)
        for overflow in (True, False, True, True):
            scaler.update(overflow)
        scales[consecutive] = scaler.scale
    assert scales == {False: 2.0, True: 4.0}
