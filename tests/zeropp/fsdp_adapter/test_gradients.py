"""What FSDP2 does because of us, where a run's results do not show it."""

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from tests.ranks import ranks
from tests.zeropp.optim.test_offload import FORMATS, ON_HOST, offloaded, sharded
from tests.zeropp.prescribed_gradients import PrescribedModel, backward, data_mesh, zero_config
from tests.zeropp.sharded_training import shard_on_nodes
from tests.zeropp.small_model import loss_of, tokens_of
from zeropp import fsdp_adapter as fsdp
from zeropp import shard
from zeropp.fsdp_adapter.parameters import groups_of


@pytest.mark.parametrize("settings", [FORMATS["fp32"], FORMATS["bf16"]], ids=["fp32", "bf16"])
@ranks(2)
def test_fsdp_copies_no_gradient_of_weights_on_the_host(settings):
    """Each of its copies, of a mean that was rounded and is not used, would block the host."""
    sharding = sharded(ON_HOST, settings)
    offloaded(sharding)
    copied: list[bool] = []
    to = torch.Tensor.to

    def record(
        tensor: torch.Tensor, *arguments: object, non_blocking: bool = False
    ) -> torch.Tensor:
        if isinstance(arguments[0], torch.device) and tensor.is_floating_point():
            copied.append(non_blocking)
        return to(tensor, *arguments, non_blocking=non_blocking)

    for number in range(2):
        with sharding.micro_step(last=number == 1), pytest.MonkeyPatch.context() as patch:
            loss = loss_of(sharding.model, tokens_of(number))
            patch.setattr(torch.Tensor, "to", record)
            loss.backward()
        shards = len(list(sharding.model.blocks.parameters()))  # copied for their gathers
        assert copied == [True] * shards * (number + 1)


class RecordedStream:
    """A stream that records the events it waits for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@ranks(2, ranks_per_node=1)
def test_memory_of_a_gather_that_is_dropped_is_not_reused_before_its_end():
    """It was allocated on the copy-in stream, which writes the next gather's shard into it."""
    sharding = shard_on_nodes({"stage": 3})
    loss_of(sharding.model, tokens_of(0)).backward()
    unit, event = sharding.units[0], object()
    (group,) = groups_of(unit)
    streams = {
        name: RecordedStream() for name in ("all_gather_copy_in_stream", "all_gather_stream")
    }
    unit.unshard(async_op=True)
    group._all_gather_result = group._all_gather_result._replace(all_gather_event=event)
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in streams.items():
            patch.setattr(group.comm_ctx, name, stream)
        patch.setattr(group.device_handle, "current_stream", RecordedStream)
        fsdp.free_gathered(unit)
    assert group._all_gather_result is None
    assert all(stream.waited == [event] for stream in streams.values())


@ranks(2, ranks_per_node=1)
def test_the_pass_after_an_exception_in_forward_waits_for_the_optimizer():
    """FSDP2's streams wait for the current one where a pass begins, not where one goes on."""
    sharding = shard_on_nodes({"stage": 3})
    loss_of(sharding.model, tokens_of(0)).backward()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = sharding.model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        loss_of(sharding.model, tokens_of(0))
    hook.remove()
    (group,) = groups_of(sharding.units[0])
    streams = {group.comm_ctx.all_gather_stream, group.comm_ctx.all_gather_copy_in_stream}
    waiting = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu.Stream, "wait_stream", lambda stream, other: waiting.add(stream))
        with torch.no_grad():
            loss_of(sharding.model, tokens_of(0))
    assert streams <= waiting


@ranks(2)
def test_a_model_may_take_no_inputs_where_fsdp2_expects_some():
    """As it does on GPUs before torch 2.13, which move inputs to the device."""
    begin = FSDPState._root_pre_forward

    def move_inputs(state, module, args, kwargs):
        moved = [tuple(args)] if args else [()] if kwargs else []
        return moved[0], begin(state, module, args, kwargs)[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPState, "_root_pre_forward", move_inputs)
        sharding = shard(PrescribedModel([[(4, 3)]]), data_mesh(), zero_config({"stage": 3}))
        backward(sharding, [torch.full((4, 3), 2.0)])
    (weight,) = sharding.model.parameters()
    assert (weight.grad.to_local() == 2.0).all()
