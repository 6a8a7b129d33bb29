"""Records small checkpoints that megatron-core writes on a CPU, with what its models answer.

    pip install megatron-core
    python tools/record/record_megatron.py record
    python tools/record/record_megatron.py check EXPORT ANSWERS.pt

`record` trains each of two models for 3 steps on one rank, lets four or two ranks load it, so that
megatron-core itself reshards it, and save it in both formats. Beside each checkpoint are answers:
tokens, the logits for them, the loss of the next step and that of the step after it. A mixture of
experts is drawn and not trained: the first of two layers is dense, the second has four experts, a
shared one and a router with a bias. One rank writes it as torch_dist, with all experts in one
tensor or in one each, and as a legacy file. Experts run one after another, as the grouped ones need
a GPU. `check` lets megatron-core load what `megatron-zpp convert --to-megatron` wrote, and compares
logits.
"""

import contextlib
import os
import shutil
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

RECORDED = Path(__file__).parents[2] / "tests/megatron_zpp/interchange/foreign/recorded"
SEQUENCE, VOCABULARY, STEPS = 16, 96, 3
COMMON = dict(
    num_layers=2, hidden_size=16, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
    params_dtype=torch.float32, pipeline_dtype=torch.float32, use_cpu_initialization=True,
    bias_dropout_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False,
    gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
)  # fmt: skip
EXPERTS = dict(
    moe_router_topk=2, moe_ffn_hidden_size=12, moe_layer_freq=[0, 1],
    moe_shared_expert_intermediate_size=8, moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True, moe_router_load_balancing_type="none",
    moe_router_topk_scaling_factor=1.5,
)  # fmt: skip
MODELS = {
    "gpt2": COMMON,
    "llama": COMMON
    | dict(
        num_query_groups=2, ffn_hidden_size=24, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False,
    ),
}  # fmt: skip
MODELS["moe"] = MODELS["llama"] | EXPERTS | {
    "num_moe_experts": 4, "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
# What Megatron-LM stores as its arguments, as far as it describes the model and the run.
ARGS = {
    "gpt2": dict(
        normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False,
        add_bias_linear=True, untie_embeddings_and_output_weights=False, ffn_hidden_size=64,
        group_query_attention=False, num_query_groups=1,
    ),
    "llama": dict(
        normalization="RMSNorm", position_embedding_type="rope", swiglu=True,
        add_bias_linear=False, untie_embeddings_and_output_weights=True, ffn_hidden_size=24,
        group_query_attention=True, num_query_groups=2, rotary_base=10000, rotary_percent=1.0,
    ),
}  # fmt: skip
ARGS["moe"] = ARGS["llama"] | EXPERTS | {
    "num_experts": 4, "expert_model_parallel_size": 1, "moe_grouped_gemm": False,
}  # fmt: skip
BY_LAYER = {"singleton_local_shards": True}
FULLY_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
# folder: model, tensor ranks, pipeline ranks, what megatron-core's sharded_state_dict is asked for
SAVED = {
    "gpt2": ("gpt2", 2, 2, {}),
    "llama": ("llama", 2, 1, BY_LAYER),
    "distributed_llama": ("llama", 1, 1, FULLY_RESHARDABLE),  # by the distributed optimizer
}
FORMS_OF_EXPERTS = {"moe": {}, "moe_apart": BY_LAYER}


class OnCpu(TorchFunctionMode):
    """Makes tensors that megatron-core wants on a GPU on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def no_fork(self: CudaRNGStatesTracker, name: str = "") -> Any:
    """Replace the generator of dropout, which is 0 here, by none."""
    return contextlib.nullcontext()


def start(
    rank: int, tensor_ranks: int, pipeline_ranks: int, store: str, data_ranks: int = 1
) -> None:
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    torch.cuda.current_stream = lambda: None
    CudaRNGStatesTracker.fork = no_fork
    world = tensor_ranks * pipeline_ranks * data_ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor_ranks, pipeline_ranks)


def make_gpt(name: str, tensor_ranks: int = 1, pipeline_ranks: int = 1) -> GPTModel:
    torch.manual_seed(1)
    config = TransformerConfig(
        **MODELS[name],
        tensor_model_parallel_size=tensor_ranks,
        pipeline_model_parallel_size=pipeline_ranks,
    )
    args, has_experts = ARGS[name], "num_moe_experts" in MODELS[name]
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    if has_experts:
        moe_utils.te_general_gemm = None  # of Transformer Engine, which needs a GPU
        norm = config.normalization
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type=args["position_embedding_type"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return drawn(model) if has_experts else model


@torch.no_grad()
def drawn(model: GPTModel) -> GPTModel:
    """Draw every tensor of a mixture of experts."""
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.decoder.layers[1].mlp.router.expert_bias.normal_(0.0, 0.1)
    return model.eval()


def make_model(
    name: str, tensor_ranks: int = 1, pipeline_ranks: int = 1, *, distributed: bool = False
) -> tuple[Any, Any]:
    """Return the model and its optimizer."""
    model = make_gpt(name, tensor_ranks, pipeline_ranks)
    model = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        ),
        model,
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.0,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    return model, get_megatron_optimizer(settings, [model])


def batches() -> torch.Tensor:
    """Return tokens int64 [steps, batch, SEQUENCE + 1]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (STEPS + 2, 4, SEQUENCE + 1), generator=generator)


def run(model: Any, tokens: torch.Tensor, with_loss: bool) -> torch.Tensor:
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(SEQUENCE).expand(inputs.shape)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    return model(inputs, positions, mask, labels=labels.contiguous() if with_loss else None)


def train_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> float:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = run(model, tokens, True).mean()
    loss.backward()
    model.finish_grad_sync()
    assert optimizer.step()[0]
    return loss.item()


def args_of(name: str, tensor_ranks: int, pipeline_ranks: int) -> Namespace:
    common = dict(
        num_layers=MODELS[name]["num_layers"], hidden_size=16,
        num_attention_heads=4, kv_channels=4, seq_length=SEQUENCE,
        max_position_embeddings=SEQUENCE, norm_epsilon=1e-5, layernorm_epsilon=1e-5,
        padded_vocab_size=VOCABULARY, vocab_size=90, make_vocab_size_divisible_by=16,
        hidden_dropout=0.0, attention_dropout=0.0,
        bias_gelu_fusion=False, openai_gelu=False, squared_relu=False, init_method_std=0.02,
        tensor_model_parallel_size=tensor_ranks, pipeline_model_parallel_size=pipeline_ranks,
        params_dtype=torch.float32, fp16=False, bf16=False, num_experts=None, seed=1234,
        iteration=STEPS, consumed_train_samples=4 * STEPS, consumed_valid_samples=0,
        tokenizer_type="NullTokenizer", optimizer="adam", use_distributed_optimizer=False,
        add_qkv_bias=False, qk_layernorm=False, apply_layernorm_1p=False,
    )  # fmt: skip
    return Namespace(**common | ARGS[name])


def state(name: str, model: Any, optimizer: Any, ranks: tuple[int, int], **request: Any) -> dict:
    """Return what Megatron-LM saves, sharded."""
    content = dict(metadata=request) if request else {}
    tensors = model.module.sharded_state_dict(**content)
    return {
        "args": args_of(name, *ranks), "checkpoint_version": 3.0, "iteration": STEPS,
        "model": tensors, "optimizer": optimizer.sharded_state_dict(tensors, **content),
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": 4 * STEPS},
        "num_floating_point_operations_so_far": 0,
    }  # fmt: skip


def answers_of(model: Any, optimizer: Any, tokens: torch.Tensor) -> dict:
    """Return what a trained model answers, which the next steps change."""
    with torch.no_grad():
        logits = run(model, tokens[0], False)
    losses = [train_step(model, optimizer, batch) for batch in tokens[STEPS:]]
    versions = {"megatron-core": megatron.core.__version__, "torch": str(torch.__version__)}
    print(losses, versions)
    answers = {"tokens": tokens, "logits": logits.detach().clone(), "losses": losses}
    return answers | {"versions": versions}


def pack(folder: Path, name: str) -> None:
    """Record what was saved in a folder."""
    with tarfile.open(RECORDED / f"{name}.tar.xz", "w:xz") as archive:
        archive.add(folder, arcname=".")


def train(rank: int, name: str, request: dict, folder: Path) -> None:
    """Train a model on one rank and save it and its answers in `folder`."""
    start(0, 1, 1, str(folder / "store"))
    with OnCpu():
        is_distributed = request == FULLY_RESHARDABLE
        model, optimizer = make_model(name, distributed=is_distributed)
        tokens = batches()
        for batch in tokens[:STEPS]:
            train_step(model, optimizer, batch)
        (folder / "one_rank").mkdir()
        content = state(name, model, optimizer, (1, 1), **(request if is_distributed else {}))
        dist_checkpointing.save(content, str(folder / "one_rank"))
        torch.save(answers_of(model, optimizer, tokens), folder / "answers.pt")


def reshard(rank: int, name: str, ranks: tuple[int, int], request: dict, folder: Path) -> None:
    """Load what `train` saved on these ranks, and save it in both formats."""
    start(rank, *ranks, str(folder / "store_of_ranks"))
    with OnCpu():
        model, optimizer = make_model(name, *ranks)
        tensors = model.module.sharded_state_dict()
        wanted = {
            "model": tensors,
            "optimizer": optimizer.sharded_state_dict(tensors, is_loading=True),
        }
        loaded = dist_checkpointing.load(wanted, str(folder / "one_rank"))
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        target = folder / "torch_dist/iter_0000003"
        if rank == 0:
            target.mkdir(parents=True)
        dist.barrier()
        content = state(name, model, optimizer, ranks, **request)
        dist_checkpointing.save(content, str(target))
        save_legacy(folder / "legacy/iter_0000003", name, model, optimizer, ranks)


def save_legacy(
    folder: Path, name: str, model: Any, optimizer: Any, ranks: tuple[int, int]
) -> None:
    """Save this rank's part as Megatron-LM's --ckpt-format torch does."""
    part = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if ranks[1] > 1:
        part += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    (folder / part).mkdir(parents=True)
    content = {
        "args": args_of(name, *ranks), "checkpoint_version": 3.0, "iteration": STEPS,
        "model": model.module.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict(),
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": 4 * STEPS},
        "rng_state": [{"random_rng_state": (3, (1, 2), None)}],
    }  # fmt: skip
    torch.save(content, folder / part / "model_optim_rng.pt")


def record(target: str) -> None:
    name, tensor_ranks, pipeline_ranks, request = SAVED[target]
    folder = Path(tempfile.mkdtemp())
    mp.spawn(train, (name, request, folder))
    ranks = (tensor_ranks, pipeline_ranks)
    if ranks == (1, 1):
        (folder / "torch_dist").mkdir()
        (folder / "one_rank").rename(folder / "torch_dist/iter_0000003")
    else:
        mp.spawn(reshard, (name, ranks, request, folder), nprocs=tensor_ranks * pipeline_ranks)
    for kind in folder.glob("*/"):
        (kind / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        if kind.name != "one_rank":
            pack(kind, f"megatron_{kind.name}_{target}")
    shutil.move(folder / "answers.pt", RECORDED / f"megatron_{name}_answers.pt")
    shutil.rmtree(folder)


def record_experts(rank: int, folder: Path) -> None:
    """Save a mixture of experts in all forms, and what it answers."""
    start(0, 1, 1, str(folder / "store"))
    common = {"args": args_of("moe", 1, 1), "checkpoint_version": 3.0, "iteration": STEPS}
    with OnCpu():
        model, tokens = make_gpt("moe"), batches()
        with torch.no_grad():
            logits = run(model, tokens[0], False)
        for name, request in FORMS_OF_EXPERTS.items():
            target = folder / f"torch_dist_{name}" / "iter_0000003"
            target.mkdir(parents=True)
            tensors = model.sharded_state_dict(**{"metadata": request} if request else {})
            dist_checkpointing.save(common | {"model": tensors}, str(target))
        target = folder / "legacy_moe" / "iter_0000003" / "mp_rank_00"
        target.mkdir(parents=True)
        state = common | {"model": model.state_dict_for_save_checkpoint()}
        torch.save(state, target / "model_optim_rng.pt")
    for kind in folder.glob("*_moe*/"):
        (kind / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        pack(kind, f"megatron_{kind.name}")
    answers = {"tokens": tokens, "logits": logits.clone(), "losses": []}
    torch.save(answers, RECORDED / "megatron_moe_answers.pt")


def check(rank: int, export: str, answers: str) -> None:
    """Let megatron-core load an exported checkpoint, and compare its logits with the answers."""
    expected = torch.load(answers)
    with tempfile.TemporaryDirectory() as folder, OnCpu():
        start(0, 1, 1, f"{folder}/store")
        model = make_gpt(Path(answers).name.split("_")[1])
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(torch.nan)
        tensors = model.sharded_state_dict()
        loaded = dist_checkpointing.load(tensors, export)
        model.load_state_dict({name: loaded[name] for name in tensors})
        with torch.no_grad():
            logits = run(model, expected["tokens"][0], False)
        difference = (logits - expected["logits"]).abs().max().item()
    print(f"megatron-core {megatron.core.__version__}: logits differ by {difference:.2e} at most")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.argv[1] == "check":
        mp.spawn(check, tuple(sys.argv[2:4]))
    for target in (sys.argv[2:] or [*SAVED, "moe"]) if sys.argv[1] == "record" else ():
        if target == "moe":
            with tempfile.TemporaryDirectory() as temporary:
                mp.spawn(record_experts, (Path(temporary),))
        else:
            record(target)
