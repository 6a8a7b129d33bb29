"""A reduce-scatter on a ring, as NCCL's: each rank sends (N - 1)/N of the sum once.

gloo's own sends twice as much. FSDP2 with this one sends what it does on GPUs.
"""

import torch
import torch.distributed as dist


class RingReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes; sums are in the dtype of the input."""

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` (N·n,) of all ranks; `output_tensor` (n,) is this rank's part.

        The part that this rank ends with begins its way at the next rank.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        parts = input_tensor.view(size, -1)
        arrived = output_tensor
        sent = parts[(rank - 1) % size]
        for step in range(2, size + 1):
            works = [
                dist.isend(sent, group=group, group_dst=(rank + 1) % size),
                dist.irecv(arrived, group=group, group_src=(rank - 1) % size),
            ]
            for work in works:
                work.wait()
            sent = parts[(rank - step) % size]
            sent += arrived
        output_tensor.copy_(sent)
        if op == dist.ReduceOp.AVG:
            output_tensor /= size
