"""Who ends the accumulation of a step, when ranks average gradients, and what they make of them."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError

RTOL = 1e-5  # fp32 sums of other orders


def norm_of_plain(tokens: torch.Tensor) -> float:
    plain = small_model()
    loss_of(plain, tokens).backward()
    return torch.nn.utils.get_total_norm([each.grad for each in plain.parameters()]).item()


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_each_step_ends_an_accumulation_where_the_json_leaves_that_to_the_caller(stage):
    """Three passes, although the JSON names four; sums over the two ranks are twice the means."""
    engine = engine_of(
        stage=stage,
        micro_batches=4,
        managed_gradient_accumulation=False,
        gradient_allreduce_op="sum",
    )
    mine = tokens_of(0, 12).chunk(2)[dist.get_rank()].chunk(3)
    for tokens in mine:
        assert not engine.is_gradient_accumulation_boundary()
        engine.backward(loss_of(engine, tokens) / 3, scale_wrt_gas=False)
    engine.step()
    assert engine.was_step_applied() and engine.global_samples == 3 * 2  # of one sample and rank
    assert engine.get_global_grad_norm() == pytest.approx(
        2 * norm_of_plain(tokens_of(0, 12)), rel=RTOL
    )
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(InputError, match="coalesce_grad_reduction"):
        engine.coalesce_grad_reduction().__enter__()


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_the_gradients_of_several_passes_are_averaged_at_once(stage):
    engine = engine_of(stage=stage)
    mine = tokens_of(0, 12).chunk(2)[dist.get_rank()].chunk(3)
    for _ in range(2):
        with engine.coalesce_grad_reduction():
            engine.sharding.traffic.take()
            for tokens in mine:
                engine.backward(loss_of(engine, tokens) / 3)
            sent = engine.sharding.traffic.take()
            assert not any(size for (purpose, _), size in sent.items() if purpose == "gradients")
            with pytest.raises(AssertionError, match=r"step\(\) inside engine.no_sync"):
                engine.step()
            for nested in (engine.no_sync, engine.coalesce_grad_reduction):
                with pytest.raises(AssertionError):
                    nested().__enter__()
        engine.zero_grad() if engine.global_steps else engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm_of_plain(tokens_of(0, 12)), rel=RTOL)


@ranks(1)
def test_an_engine_without_shards_coalesces_nothing():
    with pytest.raises(NotImplementedError, match="stage 1, 2 or 3"):
        engine_of(stage=0).coalesce_grad_reduction().__enter__()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ranks(1)
def test_forward_under_autocast(dtype):
    """The loss is that of `torch.autocast`; float16 has a loss scale, and weights stay in fp32."""
    autocast = {"enabled": True, "dtype": str(dtype), "lower_precision_safe_modules": ["x.Y"]}
    engine = engine_of(stage=2, torch_autocast=autocast)
    tokens, plain = tokens_of(0), small_model()
    with torch.autocast("cpu", dtype):
        expected = loss_of(plain, tokens)
    loss = loss_of(engine, tokens)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied() and engine.dynamic_loss_scale() is (dtype == torch.float16)
    assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == engine.loss_scale
    assert {each.dtype for each in engine.module.parameters()} == {torch.float32}
