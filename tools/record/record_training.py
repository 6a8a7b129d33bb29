"""Records checkpoints that megatron-core 0.19 writes with its own training program's functions.

    pip install megatron-core==0.19.2 psutil triton  # Python 3.12 or later
    python tools/record/record_training.py record
    python tools/record/record_training.py check EXPORT ANSWERS.pt

Since 0.19 the package contains `megatron.training`. Its parser makes the arguments of flags, its
save_checkpoint and load_checkpoint write and read the files. `record` trains a model of
record_megatron.py on one rank; several ranks load it and save it. What the models answer must be
what is recorded of 0.16.1. `check` lets load_checkpoint load what `--to-megatron` wrote, on two
tensor ranks, and compares logits.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import record_buckets as buckets
import record_megatron as megatron
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import DistributedOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import initialize_rerun_state_machine
from megatron.training import checkpointing
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_args

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 4 --train-iters 5 --lr 1e-2 "
    "--weight-decay 0.1 --clip-grad 0 --tokenizer-type NullTokenizer --vocab-size 90 "
    "--make-vocab-size-divisible-by 16 --transformer-impl local --hidden-dropout 0 "
    "--attention-dropout 0 --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--no-bias-gelu-fusion --mock-data --save-interval 3 --no-load-rng --no-save-rng"
)
MODELS = {
    "gpt2": "",
    "llama": "--group-query-attention --num-query-groups 2 --ffn-hidden-size 24 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope",
}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What the ranks save: sizes as in record_buckets.py, and further flags."""

    target: buckets.Target
    distributed: bool = True
    flags: str = ""


SAVED = {
    "core19_gpt2": Saved(
        target=buckets.Target(model="gpt2", tensor_ranks=2, stages=2), distributed=False
    ),
    "core19_buckets_llama": Saved(
        target=buckets.Target(
            model="llama", tensor_ranks=2, data_ranks=2, bucket_size=1000, dtype=torch.bfloat16
        ),
        flags="--bf16 --overlap-grad-reduce --ddp-bucket-size 1000 "
        "--accumulate-allreduce-grads-in-fp32",
    ),
    "core19_reshardable_llama": Saved(
        target=buckets.Target(model="llama", data_ranks=2),
        flags="--dist-ckpt-optim-fully-reshardable",
    ),
}


def set_arguments(saved: Saved, save: Path, load: Path | None) -> None:
    """Let Megatron parse and check the flags, and keep what its functions look up."""
    target = saved.target
    flags = f"{FLAGS} {MODELS[target.model]} {saved.flags} --save {save}"
    flags += f" --tensor-model-parallel-size {target.tensor_ranks}"
    flags += f" --pipeline-model-parallel-size {target.stages}"
    flags += f" --global-batch-size {4 * target.data_ranks}"
    if load is not None:
        flags += f" --load {load}"
    if saved.distributed:
        flags += " --use-distributed-optimizer"
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *flags.split()]):
        with mock.patch.dict(os.environ, ranks):
            args = parse_args()
            validate_args(args)
    args.padded_vocab_size = megatron.VOCABULARY
    args.iteration, args.consumed_train_samples = megatron.STEPS, 4 * megatron.STEPS
    set_args(args)
    init_num_microbatches_calculator(
        rank=dist.get_rank(), rampup_batch_size=None, global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size, data_parallel_size=target.data_ranks,
        decrease_batch_size_if_needed=False,
    )  # fmt: skip


def build(saved: Saved) -> tuple[list[Any], Any, Any]:
    """Return this rank's modules, their optimizer and its schedule."""
    target = saved.target
    if saved.distributed:
        modules = buckets.make_chunks(target)
        optimizer = get_megatron_optimizer(buckets.settings_of(target), modules)
    else:
        module, optimizer = megatron.make_model(target.model, target.tensor_ranks, target.stages)
        modules = [module]
    # Of no parameters: it would spare vectors of weight decay, which was not recorded of 0.16.1.
    schedule = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]), init_lr=0.0, max_lr=1e-2, min_lr=0.0,
        lr_warmup_steps=0, lr_decay_steps=100, lr_decay_style="constant",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=100, wd_incr_style="constant",
    )  # fmt: skip
    return modules, optimizer, schedule


def start(rank: int, target: buckets.Target, store: Path) -> None:
    megatron.start(rank, target.tensor_ranks, target.stages, str(store), target.data_ranks)
    torch.cuda.get_device_properties = lambda *args: SimpleNamespace(major=10, minor=0)
    torch.cuda.get_device_capability = lambda *args: (10, 0)
    torch.cuda.get_rng_state = lambda *args: torch.zeros(1, dtype=torch.uint8)
    DistributedOptimizer._set_main_param_and_optimizer_states = buckets.set_states_with_step
    initialize_rerun_state_machine()


def train(rank: int, saved: Saved, folder: Path) -> None:
    """Train a model on one rank, save it, and compare its answers with the recorded ones."""
    model = saved.target.model
    alone = Saved(
        target=buckets.Target(model=model),
        distributed=saved.distributed,
        flags="--dist-ckpt-optim-fully-reshardable" if saved.distributed else "",
    )
    start(0, alone.target, folder / "store")
    with megatron.OnCpu():
        set_arguments(alone, folder / "one_rank", None)
        modules, optimizer, schedule = build(alone)
        tokens = megatron.batches()
        for batch in tokens[: megatron.STEPS]:
            megatron.train_step(modules[0], optimizer, batch)
        checkpointing.save_checkpoint(megatron.STEPS, modules, optimizer, schedule, 0)
        answers = megatron.answers_of(modules[0], optimizer, tokens)
    expected = torch.load(megatron.RECORDED / f"megatron_{model}_answers.pt")
    for key in ("logits", "losses"):
        torch.testing.assert_close(answers[key], expected[key], atol=1e-6, rtol=0)


def save(rank: int, saved: Saved, folder: Path) -> None:
    """Load what `train` saved on several ranks, and save it."""
    start(rank, saved.target, folder / "store_of_ranks")
    with megatron.OnCpu():
        set_arguments(saved, folder / "saved", folder / "one_rank")
        modules, optimizer, schedule = build(saved)
        if saved.distributed:  # a state, which is overwritten
            for part in optimizer.chained_optimizers:
                part._init_optimizer_states_with_dummy_values()
        checkpointing.load_checkpoint(modules, optimizer, schedule)
        checkpointing.save_checkpoint(megatron.STEPS, modules, optimizer, schedule, 0)


def record(name: str) -> None:
    saved = SAVED[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        mp.spawn(train, (saved, folder))
        mp.spawn(save, (saved, folder), nprocs=saved.target.ranks)
        megatron.pack(folder / "saved", f"megatron_{name}")


def check(rank: int, export: str, answers: str, folder: str) -> None:
    """Let load_checkpoint load an export, and compare its logits with the answers."""
    name = "llama" if "llama" in answers else "gpt2"
    saved = Saved(
        target=buckets.Target(model=name, tensor_ranks=2), distributed=False, flags="--finetune"
    )
    start(rank, saved.target, Path(folder) / "store")
    expected = torch.load(answers)
    with megatron.OnCpu():
        set_arguments(saved, Path(folder) / "save", Path(export))
        modules, *_ = build(saved)
        checkpointing.load_checkpoint(modules, None, None)
        with torch.no_grad():
            logits = megatron.run(modules[0], expected["tokens"][0], False)
    parts = [torch.empty_like(logits) for _ in range(2)]  # of the vocabulary
    dist.all_gather(
        parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    difference = (torch.cat(parts, dim=-1) - expected["logits"]).abs().max().item()
    if rank == 0:
        version = megatron.megatron.core.__version__
        print(f"megatron-core {version}: logits differ by {difference:.2e} at most")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.argv[1] == "record":
        for name in sys.argv[2:] or SAVED:
            record(name)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            mp.spawn(check, (*sys.argv[2:4], temporary), nprocs=2)
