"""The dynamic loss scale changes as in Megatron."""

import pytest

from zeropp import InputError, LossScaler


def test_halves_after_hysteresis_and_doubles_after_a_clean_window():
    scaler = LossScaler(scale=1024.0, window=3, hysteresis=2)
    scales = []
    for overflow in (True, True, False, False, False, True, True):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [1024, 512, 512, 512, 1024, 1024, 512]


def test_hysteresis_is_not_restored_before_the_window_ends():
    scaler = LossScaler(scale=64.0, window=10, hysteresis=2)
    for overflow in (True, True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 16


def test_overflow_at_the_smallest_scale_ends_training():
    scaler = LossScaler(scale=2.0, hysteresis=1)
    scaler.update(True)
    assert scaler.scale == 1
    with pytest.raises(InputError, match="smallest loss scale"):
        scaler.update(True)


def test_fixed_scale_stays():
    scaler = LossScaler(scale=128.0, dynamic=False, hysteresis=1, window=1)
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 128


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
