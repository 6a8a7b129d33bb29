"""Records checkpoints of megatron-core's distributed optimizer, whose state lies in buckets.

    pip install megatron-core==0.16.1
    python tools/record/record_buckets.py

Each model of record_megatron.py is trained on one rank; several ranks load it, so that
megatron-core itself distributes Adam's state, and save it. The answers are those of
record_megatron.py; of `deep`, which it does not have, they are written too. What megatron-core
0.16 can no longer write is recorded with 0.14:

    pip install megatron-core==0.14.0
    python tools/record/record_buckets.py model_space_llama
"""

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import record_megatron as megatron
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import (
    DistributedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp

TRAINED = "fully_reshardable"  # what the one rank saves for the others
VERSION = megatron.megatron.core.__version__
OLD = VERSION < "0.15"
if OLD:  # it calls what NumPy 2 no longer has
    TRAINED, numpy.product = "fully_sharded_model_space", numpy.prod
megatron.MODELS["deep"] = megatron.MODELS["llama"] | {"num_layers": 4}
megatron.ARGS["deep"] = megatron.ARGS["llama"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Who saves what, and where; `kind` is megatron-core's name of the layout."""

    model: str
    kind: str = "dp_reshardable"
    tensor_ranks: int = 1
    stages: int = 1
    data_ranks: int = 1
    chunks: int = 1  # of layers on each stage
    bucket_size: int | None = None
    pad_buckets: bool = False
    dtype: torch.dtype = torch.float32
    fused_norms: bool = False  # in linear layers, as in Transformer Engine's modules

    @property
    def ranks(self) -> int:
        return self.tensor_ranks * self.stages * self.data_ranks


TARGETS = {
    "buckets_gpt2": Target(model="gpt2", tensor_ranks=2, stages=2, data_ranks=2),
    "buckets_llama": Target(
        model="llama", tensor_ranks=2, data_ranks=2, bucket_size=1000, dtype=torch.bfloat16,
        fused_norms=True,
    ),
    "buckets_deep": Target(model="deep", stages=2, chunks=2, bucket_size=900, pad_buckets=True),
    "gathered_llama": Target(
        model="llama", tensor_ranks=2, data_ranks=2, bucket_size=1000,
        kind="dp_zero_gather_scatter",
    ),
    "model_space_llama": Target(
        model="llama", tensor_ranks=2, data_ranks=2, bucket_size=1000,
        kind="fully_sharded_model_space",
    ),
}  # fmt: skip
BY_FILES = ("buckets_gpt2", "buckets_llama", "buckets_deep")  # saved as distrib_optim.pt too
NEWER = (*BY_FILES, "gathered_llama")


class LinearWithNorm(ColumnParallelLinear):
    """A linear layer that contains the normalization before it, as Transformer Engine's do."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self._parameters = {"layer_norm_weight": norm, **self._parameters}


def layer_spec(target: Target) -> ModuleSpec:
    args = megatron.ARGS[target.model]
    spec = get_gpt_layer_local_spec(normalization=args["normalization"])
    if target.fused_norms:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        layer.self_attention.submodules.linear_qkv = LinearWithNorm
        layer.mlp.submodules.linear_fc1 = LinearWithNorm
        layer.sharded_state_dict_keys_map = {}
    return spec


def make_chunks(target: Target) -> list[Any]:
    """Return this rank's parts of the model."""
    torch.manual_seed(1)  # as record_megatron.py, whose answers are compared
    args = megatron.ARGS[target.model]
    interleaved = target.chunks if target.chunks > 1 else None
    settings = megatron.MODELS[target.model] | {
        "params_dtype": target.dtype, "pipeline_dtype": target.dtype,
        "bf16": target.dtype == torch.bfloat16,
    }  # fmt: skip
    config = TransformerConfig(
        **settings,
        tensor_model_parallel_size=target.tensor_ranks,
        pipeline_model_parallel_size=target.stages,
        virtual_pipeline_model_parallel_size=interleaved,
    )
    ddp = dict(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=target.bucket_size,
        overlap_grad_reduce=target.bucket_size is not None,
        pad_buckets_for_high_nccl_busbw=target.pad_buckets,
    )  # fmt: skip
    stage = parallel_state.get_pipeline_model_parallel_rank()
    modules = []
    for chunk in range(target.chunks):
        module = GPTModel(
            config,
            layer_spec(target),
            vocab_size=megatron.VOCABULARY,
            max_sequence_length=megatron.SEQUENCE,
            position_embedding_type=args["position_embedding_type"],
            share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
            pre_process=(chunk, stage) == (0, 0),
            post_process=(chunk, stage) == (target.chunks - 1, target.stages - 1),
            vp_stage=chunk if interleaved else None,
        )
        module = module.to(target.dtype)
        modules.append(
            DistributedDataParallel(
                config, DistributedDataParallelConfig(**ddp), module, disable_bucketing=chunk > 0
            )
        )
    return modules


def settings_of(target: Target) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.0, params_dtype=target.dtype,
        bf16=target.dtype == torch.bfloat16, use_distributed_optimizer=True,
    )  # fmt: skip


def make_optimizer(target: Target, modules: list[Any]) -> Any:
    """Return an optimizer with a state, which is overwritten when another is loaded."""
    optimizer = get_megatron_optimizer(settings_of(target), modules)
    for part in optimizer.chained_optimizers:
        part._init_optimizer_states_with_dummy_values()
    return optimizer


def sharded(optimizer: Any, tensors: dict, kind: str, *, is_loading: bool = False) -> dict:
    if OLD:
        return optimizer.sharded_state_dict(tensors, is_loading, sharding_type=kind)
    metadata = {
        "distrib_optim_sharding_type": kind,
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }
    return optimizer.sharded_state_dict(tensors, is_loading=is_loading, metadata=metadata)


get_states = DistributedOptimizer._get_main_param_and_optimizer_states
set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def get_states_without_step(self: DistributedOptimizer, parameter: Any) -> dict:
    """Leave out the number of updates, of which 0.14 cannot save what PyTorch's AdamW has."""
    return {key: each for key, each in get_states(self, parameter).items() if key != "step"}


def set_states_with_step(self: DistributedOptimizer, parameter: Any, tensors: dict) -> None:
    """Add the number of updates, which megatron-core does not load into PyTorch's AdamW."""
    set_states(self, parameter, {"step": torch.tensor(float(megatron.STEPS)), **tensors})


def names(chunks: int) -> Iterator[str]:
    """The keys under which Megatron-LM saves the parts of a model."""
    return iter(["model"] if chunks == 1 else [f"model{chunk}" for chunk in range(chunks)])


def args_of(target: Target) -> Namespace:
    args = megatron.args_of(target.model, target.tensor_ranks, target.stages)
    return Namespace(
        **vars(args)
        | dict(
            use_distributed_optimizer=True, data_parallel_size=target.data_ranks,
            context_parallel_size=1, world_size=target.ranks, params_dtype=target.dtype,
            bf16=target.dtype == torch.bfloat16, accumulate_allreduce_grads_in_fp32=True,
            overlap_grad_reduce=target.bucket_size is not None, ddp_bucket_size=target.bucket_size,
            ddp_pad_buckets_for_high_nccl_busbw=target.pad_buckets,
            virtual_pipeline_model_parallel_size=target.chunks if target.chunks > 1 else None,
            transformer_impl="transformer_engine" if target.fused_norms else "local",
        )
    )  # fmt: skip


def common_state(target: Target) -> dict:
    return {
        "args": args_of(target), "checkpoint_version": 3.0, "iteration": megatron.STEPS,
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": 4 * megatron.STEPS},
        "num_floating_point_operations_so_far": 0,
    }  # fmt: skip


def train(rank: int, target: Target, folder: Path) -> None:
    """Train a model on one rank and save it and its answers in `folder`."""
    megatron.start(0, 1, 1, str(folder / "store"))
    alone = Target(model=target.model)
    with megatron.OnCpu():
        modules = make_chunks(alone)
        optimizer = get_megatron_optimizer(settings_of(alone), modules)
        tokens = megatron.batches()
        for batch in tokens[: megatron.STEPS]:
            megatron.train_step(modules[0], optimizer, batch)
        (folder / "one_rank").mkdir()
        tensors = modules[0].module.sharded_state_dict()
        content = {"model": tensors, "optimizer": sharded(optimizer, tensors, TRAINED)}
        dist_checkpointing.save(content, str(folder / "one_rank"))
        torch.save(megatron.answers_of(modules[0], optimizer, tokens), folder / "answers.pt")


def distribute(rank: int, target: Target, by_files: bool, folder: Path) -> None:
    """Load what `train` saved on the ranks of the target, and save it."""
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step
    if OLD:
        DistributedOptimizer._get_main_param_and_optimizer_states = get_states_without_step
    store = str(folder / "store_of_ranks")
    megatron.start(rank, target.tensor_ranks, target.stages, store, target.data_ranks)
    if target.chunks > 1:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(target.chunks)
    with megatron.OnCpu():
        modules = make_chunks(target)
        optimizer = make_optimizer(target, modules)
        keys = list(names(target.chunks))
        tensors = {
            key: module.module.sharded_state_dict()
            for key, module in zip(keys, modules, strict=True)
        }
        wanted = dict(tensors)
        wanted["optimizer"] = sharded(optimizer, tensors, TRAINED, is_loading=True)
        loaded = dist_checkpointing.load(wanted, str(folder / "one_rank"))
        for key, module in zip(keys, modules, strict=True):
            module.module.load_state_dict(loaded[key])
        optimizer.load_state_dict(loaded["optimizer"])
        path = folder / "torch_dist/iter_0000003"
        if rank == 0:
            path.mkdir(parents=True)
        dist.barrier()
        tensors = {
            key: module.module.sharded_state_dict()
            for key, module in zip(keys, modules, strict=True)
        }
        content = common_state(target) | tensors
        content["optimizer"] = sharded(optimizer, tensors, target.kind)
        dist_checkpointing.save(content, str(path))
        if by_files:
            save_files(folder / "legacy/iter_0000003", target, modules, optimizer)


def save_files(folder: Path, target: Target, modules: list[Any], optimizer: Any) -> None:
    """Save this rank's part as Megatron-LM's --ckpt-format torch does."""
    part = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if target.stages > 1:
        part += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    (folder / part).mkdir(parents=True, exist_ok=True)
    optimizer.save_parameter_state(str(folder / part / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0:
        content = common_state(target) | {"optimizer": optimizer.state_dict()}
        for key, module in zip(names(target.chunks), modules, strict=True):
            content[key] = module.module.state_dict_for_save_checkpoint()
        torch.save(content, folder / part / "model_optim_rng.pt")


def record(name: str) -> None:
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        mp.spawn(train, (target, folder))
        mp.spawn(distribute, (target, name in BY_FILES, folder), nprocs=target.ranks)
        for kind in ("torch_dist", "legacy") if name in BY_FILES else ("torch_dist",):
            pointer = folder / kind / "latest_checkpointed_iteration.txt"
            pointer.write_text(str(megatron.STEPS))
            megatron.pack(folder / kind, f"megatron_{kind}_{name}")
        if target.model == "deep":
            (folder / "answers.pt").rename(megatron.RECORDED / "megatron_deep_answers.pt")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in sys.argv[1:] or NEWER:
        record(name)
