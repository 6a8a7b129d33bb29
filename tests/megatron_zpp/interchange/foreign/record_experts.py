"""Records small checkpoints of a mixture of experts that megatron-core writes on a CPU.

    pip install megatron-core
    python tests/megatron_zpp/interchange/foreign/record_experts.py record
    python tests/megatron_zpp/interchange/foreign/record_experts.py check EXPORT

The first of two layers is dense, the second has four experts, a shared one and a router with a
bias. One rank writes it as torch_dist, with all experts in one tensor or in one each, and as a
legacy file. Experts run one after another, as the grouped ones need a GPU. `check` lets
megatron-core load what `megatron-zpp convert --to-megatron` wrote of such a model, and compares
logits.
"""

import os
import shutil
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path

import megatron.core
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

sys.path.insert(0, str(Path(__file__).parent))
import record_megatron as megatron_record

EXPERTS = dict(
    moe_router_topk=2, moe_ffn_hidden_size=12, moe_layer_freq=[0, 1],
    moe_shared_expert_intermediate_size=8, moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True, moe_router_load_balancing_type="none",
    moe_router_topk_scaling_factor=1.5,
)  # fmt: skip
FORMS = {"moe": {}, "moe_apart": megatron_record.BY_LAYER}  # what sharded_state_dict is asked for


def make_gpt() -> GPTModel:
    """Return a model whose every tensor is drawn."""
    torch.manual_seed(1)
    config = TransformerConfig(
        **megatron_record.MODELS["llama"], **EXPERTS, num_moe_experts=4,
        moe_token_dispatcher_type="allgather",
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config, spec, megatron_record.VOCABULARY, megatron_record.SEQUENCE,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.decoder.layers[1].mlp.router.expert_bias.normal_(0.0, 0.1)
    return model.eval()


def args_of() -> Namespace:
    """Return what Megatron-LM stores as its arguments."""
    args = vars(megatron_record.args_of("llama", 1, 1)) | EXPERTS | {"num_experts": 4}
    return Namespace(**args, expert_model_parallel_size=1, moe_grouped_gemm=False)


def record() -> None:
    folder = Path(tempfile.mkdtemp())
    megatron_record.start(0, 1, 1, str(folder / "store"))
    moe_utils.te_general_gemm = None  # of Transformer Engine, which needs a GPU
    common = {"args": args_of(), "checkpoint_version": 3.0, "iteration": 3}
    with megatron_record.OnCpu():
        model, tokens = make_gpt(), megatron_record.batches()
        with torch.no_grad():
            logits = megatron_record.run(model, tokens[0], False)
        for name, request in FORMS.items():
            content = {"metadata": request} if request else {}
            target = folder / f"torch_dist_{name}" / "iter_0000003"
            target.mkdir(parents=True)
            dist_checkpointing.save(
                common | {"model": model.sharded_state_dict(**content)}, str(target)
            )
        target = folder / "legacy_moe" / "iter_0000003" / "mp_rank_00"
        target.mkdir(parents=True)
        state = common | {"model": model.state_dict_for_save_checkpoint()}
        torch.save(state, target / "model_optim_rng.pt")
    for kind in folder.glob("*_moe*/"):
        (kind / "latest_checkpointed_iteration.txt").write_text("3")
        with tarfile.open(megatron_record.RECORDED / f"megatron_{kind.name}.tar.xz", "w:xz") as out:
            out.add(kind, arcname=".")
    versions = {"megatron-core": megatron.core.__version__, "torch": str(torch.__version__)}
    answers = {"tokens": tokens, "logits": logits.clone(), "losses": [], "versions": versions}
    torch.save(answers, megatron_record.RECORDED / "megatron_moe_answers.pt")
    shutil.rmtree(folder)


def check(export: str) -> None:
    expected = torch.load(megatron_record.RECORDED / "megatron_moe_answers.pt")
    with tempfile.TemporaryDirectory() as folder, megatron_record.OnCpu():
        megatron_record.start(0, 1, 1, f"{folder}/store")
        moe_utils.te_general_gemm = None
        model = make_gpt()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(torch.nan)
        tensors = model.sharded_state_dict()
        loaded = dist_checkpointing.load(tensors, export)
        model.load_state_dict({name: loaded[name] for name in tensors})
        with torch.no_grad():
            logits = megatron_record.run(model, expected["tokens"][0], False)
        difference = (logits - expected["logits"]).abs().max().item()
    print(f"megatron-core {megatron.core.__version__}: logits differ by {difference:.2e} at most")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.argv[1] == "record":
        record()
    else:
        check(sys.argv[2])
