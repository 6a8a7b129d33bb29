"""Adam on CPUs: moments in bf16, the optimizer, what it refuses."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.zeropp.optim.adam_checks import (
    ADAMW,
    arrays_of,
    assert_same_bits,
    with_bf16_moments,
)
from zeropp import InputError
from zeropp.deepspeed.ops.adam import DeepSpeedCPUAdam
from zeropp.optim.adam_op import (
    AdamSettings,
    Arrays,
    adam,
    random_words,
    reference,
)
from zeropp.optim.cpu_adam import CPUAdam

SAMPLES = 1 << 18


def test_moments_in_bf16_are_right_on_average():
    """A mean that each step moves by a hundredth of a unit in the last place stays on its way."""
    size, steps = 1 << 14, 100
    moments = [torch.ones(size, dtype=torch.bfloat16) for _ in range(2)]
    fp32 = [torch.zeros(size)], [torch.full((size,), 2.0)]
    arrays = Arrays(*fp32, *([moment] for moment in moments), [])
    rate = 2.0**-7 / 100  # bf16 has 2^-7 between 1 and 2
    for step in range(1, steps + 1):
        adam(arrays, None, AdamSettings(
            lr=0.0, beta1=1 - rate, beta2=1 - rate, eps=1.0, weight_decay=0.0, step=step, seed=3
        ))  # fmt: skip
    for moment, to in zip(moments, (2.0, 4.0), strict=True):
        expected = to - (to - 1) * (1 - rate) ** steps
        # Each step errs by at most half of 2^-7 in standard deviation.
        spread = 2.0**-8 * (steps / size) ** 0.5
        assert abs(moment.double().mean() - expected) < 5 * spread


def test_the_random_bits_are_even_and_differ_by_seed_step_and_place():
    def signs(seed: int, step: int, place: int = 0) -> Tensor:
        """(samples, 32) of +1 for bits that are set, and -1; their sums are exact in fp32."""
        settings = AdamSettings(lr=0, beta1=0, beta2=0, eps=0, weight_decay=0, step=step, seed=seed)
        words = random_words(settings.scalars().keys, place, torch.empty(SAMPLES))
        return ((words[:, None] >> torch.arange(32) & 1) * 2 - 1).float()

    first = signs(0, 1)
    assert torch.equal(first[100:], signs(0, 1, 100)[: SAMPLES - 100])
    far = 5 / SAMPLES**0.5  # five standard deviations of a mean of +1 and -1
    others = (signs(0, 2), signs(1, 1), signs(1, 2), first.roll(1, 0), first.roll(16, 1))
    assert first.mean(0).abs().max() < far
    for other in others:
        assert (first * other).mean(0).abs().max() < far


def parameters(seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((7, 5), (33,), ())]


def step_alike(*pairs: tuple[list[nn.Parameter], torch.optim.Optimizer], seed: int) -> None:
    """A step of each optimizer with the same gradients."""
    draw = torch.Generator().manual_seed(100 + seed)
    for alike in zip(*(owned for owned, _ in pairs), strict=True):
        gradient = torch.randn(alike[0].shape, generator=draw)
        for parameter in alike:
            parameter.grad = gradient
    for _, optimizer in pairs:
        optimizer.step()


def test_state_dicts_with_bf16_moments_load_into_torch():
    mine, theirs = parameters(), parameters()
    ours = CPUAdam(mine, lr=0.01, fp32_optimizer_states=False)
    torchs = torch.optim.AdamW(theirs, lr=0.01, fused=True)
    for seed in range(3):
        step_alike((mine, ours), (theirs, torchs), seed=seed)
        saved, torch_saved = (copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, torchs))
        ours.load_state_dict(torch_saved)
        torchs.load_state_dict(saved)
    for parameter, torch_parameter in zip(mine, theirs, strict=True):
        state = ours.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert torchs.state[torch_parameter]["exp_avg"].dtype == torch.float32
        assert state["step"] == torchs.state[torch_parameter]["step"] == 3
        # A mean and a square root that are each off by at most 2^-7, in each of three steps.
        far = 3 * 0.01 * 2.0**-5
        torch.testing.assert_close(parameter, torch_parameter, rtol=1e-6, atol=far)


def test_resuming_with_bf16_moments_changes_nothing():
    mine, again = parameters(), parameters()
    ours = CPUAdam(mine, fp32_optimizer_states=False, seed=5)
    resumed = CPUAdam(again, fp32_optimizer_states=False, seed=5)
    step_alike((mine, ours), seed=0)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    for parameter, source in zip(again, mine, strict=True):
        parameter.data.copy_(source.data)
    step_alike((mine, ours), (again, resumed), seed=1)
    copied = copy.deepcopy(ours)
    step_alike((mine, ours), (again, resumed), (copied.param_groups[0]["params"], copied), seed=2)
    for parameter, *others in zip(mine, again, copied.param_groups[0]["params"], strict=True):
        assert all(torch.equal(parameter, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_updated_in_fp32_and_rounded_after_each_step(dtype):
    """Moments stay fp32, also through a state dict, which torch's optimizers load in 16 bit."""
    whole, halves = parameters(), [nn.Parameter(each.detach().to(dtype)) for each in parameters()]
    for parameter, half in zip(whole, halves, strict=True):
        parameter.data = half.detach().float()
    exact, ours = CPUAdam(whole, lr=0.1), DeepSpeedCPUAdam(halves, lr=0.1, weight_decay=0.01)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        for parameter, half in zip(whole, halves, strict=True):
            half.grad = torch.randn(half.shape, generator=draw).to(dtype)
            parameter.grad = half.grad.float()
        exact.step()
        ours.step()
        for parameter, half in zip(whole, halves, strict=True):
            assert torch.equal(parameter.to(dtype), half)
            assert torch.equal(exact.state[parameter]["exp_avg_sq"], ours.state[half]["exp_avg_sq"])
            parameter.data = half.detach().float()
        resumed = DeepSpeedCPUAdam(halves, lr=0.1, weight_decay=0.01)
        resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
        ours = resumed


def test_parameters_that_are_not_on_the_cpu():
    meta = nn.Parameter(torch.empty(2, 3, device="meta"))
    with pytest.raises(InputError, match=r"shape \[2, 3\] is on meta: use zeropp.FusedAdam"):
        CPUAdam([meta])
    ours = CPUAdam(parameters())
    with pytest.raises(InputError, match="is on meta"):
        ours.add_param_group({"params": [meta]})
    assert len(ours.param_groups) == 1
    with pytest.raises(InputError, match="fp32 parameters"):
        CPUAdam(nn.Linear(2, 2).double().parameters())


def test_16_bit_moments_are_for_cpus_only():
    tensor = torch.empty(3, device="meta")
    half = tensor.bfloat16()
    with pytest.raises(TypeError, match="moments are torch.bfloat16; give torch.float32, all"):
        adam(Arrays([tensor], [tensor], [half], [half], []), None, ADAMW)
    with pytest.raises(TypeError, match="moments are torch.bfloat16 and torch.float32"):
        real = torch.zeros(3)
        adam(Arrays([real], [real], [real], [real.bfloat16()], []), None, ADAMW)


def test_the_op_matches_the_reference_for_any_number_of_tensors():
    """The place of an element counts on over the tensors of a call."""
    whole = with_bf16_moments(arrays_of((64,), torch.float32, None, 2))
    parts = Arrays(*([half.clone() for half in tensors[0].split(24)] for tensors in whole[:4]), [])
    reference(whole, None, ADAMW.scalars())
    reference(parts, None, ADAMW.scalars())
    joined = Arrays(*([torch.cat(part)] for part in parts[:4]), [])
    assert_same_bits(joined, whole)
