"""The memory that `--dry-run` predicts beside the peak of real steps on the CPU, as a table.

    torchrun --nproc-per-node 4 -m benchmarks.memory.dry_run

The bytes of all live tensors are measured after every op, on the rank that has most.
"""

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.shared.table import markdown_table
from benchmarks.shared.training_setup import largest_of_ranks
from megatron_zpp.data.loader import Batch
from megatron_zpp.parallel.mesh import Ranks, build_mesh
from megatron_zpp.planner.activations import LiveBytes
from megatron_zpp.planner.estimate import Estimate, estimate
from megatron_zpp.recipe.model import build_model
from megatron_zpp.recipe.optimizer import build_optimizer
from megatron_zpp.recipe.pipeline import Pipeline
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp import optimizer_step
from zeropp.ranks.process_group import start_process_group
from zeropp.ranks.topology import Environment

CPU = torch.device("cpu")
VOCABULARY = 1000
MIB = 2**20
MODEL = (
    "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 2 "
)
NODES = {"bf16": {"enabled": True}, "zeropp": {"ranks_per_node": 2}}
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}
PLUS = HPZ | {"zero_quantized_weights": True, "zero_quantized_gradients": True}
MIXZ = HPZ | {"zero_quantized_nontrainable_weights": True}
ALL_THREE, STORED = "(ZeRO++)", "(MixZ++)"
JSONS = {ALL_THREE: PLUS, STORED: MIXZ}
LORA = "--lora-rank 8 --pretrained-checkpoint none"
TENSOR, CONTEXT, PIPELINE = (
    f"--{axis}-parallel-size" for axis in ("tensor-model", "context", "pipeline-model")
)
CASES = (
    "--zero-stage 0 --global-batch-size 8",
    "--zero-stage 0 --global-batch-size 24 --bf16",
    "--zero-stage 1 --global-batch-size 8 --bf16",
    "--zero-stage 1 --global-batch-size 24",
    "--zero-stage 2 --global-batch-size 8 --bf16",
    "--zero-stage 2 --global-batch-size 24",
    "--zero-stage 3 --global-batch-size 8",
    "--zero-stage 3 --global-batch-size 24 --bf16",
    "--zero-stage 3 --global-batch-size 8 --bf16 --recompute-granularity selective",
    "--zero-stage 3 --global-batch-size 8 --bf16 --recompute-granularity full",
    "--zero-stage 0 --global-batch-size 8 --bf16 --recompute-granularity full "
    "--recompute-num-layers 3",
    "--zero-stage 1 --global-batch-size 8 --bf16 --cpu-optimizer",
    "--zero-stage 2 --global-batch-size 24 --bf16 --cpu-optimizer",
    "--zero-stage 3 --global-batch-size 8 --cpu-optimizer",
    "--zero-stage 3 --global-batch-size 8 --bf16 --cpu-optimizer --remote-device cpu",
    f"{ALL_THREE} --global-batch-size 8 --bf16",
    f"{ALL_THREE} --global-batch-size 24 --bf16 --cpu-optimizer",
    f"--zero-stage 2 --global-batch-size 24 --bf16 {LORA}",
    f"{STORED} --global-batch-size 24 --bf16 {LORA}",
    f"{STORED} --global-batch-size 24 --bf16 --cpu-optimizer {LORA}",
    f"--zero-stage 3 --global-batch-size 8 --bf16 {TENSOR} 2 --sequence-parallel",
    f"--zero-stage 1 --global-batch-size 8 --bf16 {TENSOR} 4",
    f"--zero-stage 3 --global-batch-size 8 --bf16 {CONTEXT} 2",
    f"--zero-stage 2 --global-batch-size 8 --bf16 {CONTEXT} 2 --cp-comm-type allgather",
    f"--zero-stage 1 --global-batch-size 24 --bf16 {PIPELINE} 2",
    f"--zero-stage 3 --global-batch-size 24 {PIPELINE} 2 --recompute-granularity full",
    f"--zero-stage 3 --global-batch-size 16 --bf16 {PIPELINE} 2 "
    "--num-virtual-stages-per-pipeline-rank 3",
    f"--zero-stage 1 --global-batch-size 24 --bf16 {PIPELINE} 2 {TENSOR} 2 --sequence-parallel",
)
STEPS = 2  # the first allocates Adam's moments


def predict_and_measure(flags: str) -> tuple[Estimate | None, int]:
    """The prediction for `flags` on these ranks, which rank 0 makes and returns, and the largest
    peak of any rank in bytes."""
    words = f"--mock-data --lr 1e-3 --eval-iters 0 --train-iters 9 {flags}".split()
    config = parse(words, dist.get_world_size())
    ranks, prediction = ranks_of(config), None
    if ranks.rank == 0:
        prediction = estimate(config, VOCABULARY, ranks.nodes, is_cpu=True)
    with LiveBytes() as live:
        _train(config, ranks)
    return prediction, int(largest_of_ranks(live.peak, CPU))


def _train(config: Config, ranks: Ranks) -> None:
    size = config.batch.micro_batch_size
    micro_batches = config.batch.global_batch_size // (size * ranks.num_replicas)
    sharding = build_model(config, VOCABULARY, ranks, apex=None)
    optimizer = build_optimizer(sharding, config, CPU, apex=None)
    shape = size, config.model.seq_length
    tokens, mask = torch.randint(VOCABULARY, shape), torch.ones(shape)
    batch = Batch(tokens=tokens, labels=tokens, loss_mask=mask, position_ids=None)
    for _ in range(STEPS):
        if isinstance(sharding.model, Pipeline):
            samples = ((0, batch) for _ in range(micro_batches))
            sharding.model.forward_backward(samples, [1.0] * micro_batches, lambda *_: None)
            sharding.model.sum_tied_gradients(optimizer)
        else:
            for index in range(micro_batches):
                with sharding.micro_step(last=index == micro_batches - 1):
                    sharding.model(*batch.inputs()).backward()
        optimizer_step(optimizer, sharding, clip_grad=1.0)


def ranks_of(config: Config) -> Ranks:
    """Return this process among the ranks of a run of `config`."""
    environment, parallel = Environment.read(), config.parallel
    return Ranks(
        environment=environment,
        device=CPU,
        mesh=build_mesh(CPU, environment.world_size, parallel),
        store=None,
        context_size=parallel.context_parallel_size,
        ranks_per_node=config.zero.zeropp.ranks_per_node,
    )


def main() -> None:
    """Print a row for each of `CASES`."""
    rows = []
    environment = Environment.read()
    start_process_group(environment, CPU, timedelta(minutes=5), "gloo")
    for case in CASES:
        flags = case
        for name, zero in JSONS.items():
            text = json.dumps(NODES | {"zero_optimization": zero}, separators=(",", ":"))
            flags = flags.replace(name, f"--deepspeed-config {text}")
        prediction, measured = predict_and_measure(MODEL + flags)
        if prediction is None:
            continue
        total = prediction.host_bytes
        difference = f"{total / measured - 1:+.1%}".replace("-0.0%", "0.0%")
        sizes = (f"{total / MIB:.1f}", f"{measured / MIB:.1f}")
        rows.append([f"`{case}`", *sizes, difference])
    if rows:
        columns = ["flags", "predicted, MiB", "measured, MiB", "difference"]
        print(markdown_table(columns, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
