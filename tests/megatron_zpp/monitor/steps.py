"""An iteration as it is logged, the memory that it took, and the operations of its tokens."""

from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.monitor.memory import MemoryUse
from megatron_zpp.monitor.metrics import Iteration

ITERATION = Iteration(
    iteration=10, train_iters=500000, consumed_samples=2560, consumed_tokens=5242880, seconds=0.5,
    learning_rate=1.5e-4, global_batch_size=256, seq_length=2048, loss=10.5,
)  # fmt: skip
MEMORY = MemoryUse(
    allocated_bytes=2**20, reserved_bytes=3 * 2**20, peak_allocated_bytes=2 * 2**20,
    peak_reserved_bytes=4 * 2**20, allocated_count=5,
)  # fmt: skip
FLOPS = TokenFlops(model=4.5e9, performed=6e9)
