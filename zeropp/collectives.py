"""The collectives of the sharded step: what moves, from which layout to which.

| collective    | from                        | to                      | each rank sends |
|---------------|-----------------------------|-------------------------|-----------------|
| weight gather | shard `(C,)` on each rank   | whole `(W*C,)` on each  | (W-1)*C, 16 bit |
| gradient mean | `(W*C,)` fp32 on each rank  | mean of slice r, `(C,)` | (W-1)*C, 16 bit |

W = ranks, C = elements of one rank's padded shard of an FSDP unit. The weight gather is FSDP2's
own; in fp32 runs the wire carries fp32.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zeropp.fsdp_adapter import ReduceScatter


class AllToAllReduceScatter(ReduceScatter):
    """Sum gradients by one all-to-all of `wire_dtype` and a local fp32 sum in rank order.

    Sends (W-1)/W of the buffer, where gloo's own reduce-scatter sends twice that (D6), rounds
    each term once to `wire_dtype` and accumulates in fp32 (D5), in the same order on every run.
    """

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self.wire_dtype = wire_dtype

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """`input_tensor` (W*C,) fp32 of this rank -> `output_tensor` (C,), the sum of slice r."""
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        sent = input_tensor.to(self.wire_dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        slices = received.view(group.size(), -1)  # (W, C)
        torch.sum(slices, dim=0, dtype=output_tensor.dtype, out=output_tensor)
