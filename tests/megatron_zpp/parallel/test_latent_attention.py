"""Ranks that share latent attention print the numbers of one rank, and send what is foretold."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.model.tensor_parallel import partial_parameters
from megatron_zpp.train.inputs import TRAIN
from tests.megatron_zpp.parallel.flags import CP2, GATHERED, GPT2, PP2, SP, TP2
from tests.megatron_zpp.train.training_runs import built_run, require_equal, run
from tests.ranks import ranks

WIDTHS = "--kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
SHORT = (
    GPT2 + "--train-iters 2 --multi-latent-attention --qk-layernorm --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 8 --mscale-all-dim 0.7 " + WIDTHS
)
QUERIES, BIASES = "--q-lora-rank 12 ", "--add-qkv-bias --add-attention-output-bias "
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss "
AGAIN = "--recompute-granularity full "


@pytest.mark.parametrize(
    ("flags", "num_ranks", "how"),
    [
        (QUERIES, 2, TP2 + "--zero-stage 1"),
        ("", 2, TP2 + SP + AGAIN),
        (QUERIES + BIASES + DOCUMENTS, 4, TP2 + SP + CP2 + "--zero-stage 3"),
        (QUERIES + DOCUMENTS, 2, CP2 + GATHERED + "--recompute-granularity selective"),
        (QUERIES, 2, PP2),
        (DOCUMENTS, 4, "--zero-stage 3 " + CP2),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(flags, num_ranks, how, alone, tmp_path):
    """The log line shows a formula only where another number of bytes was sent."""
    log = run(num_ranks, SHORT + flags + how, tmp_path)
    require_equal(log, alone(SHORT + flags))
    assert "(formula: " not in log


@pytest.mark.parametrize("how", [TP2, TP2 + SP])
def test_adapters(how: str, alone, tmp_path: Path) -> None:
    """Also of the layers that each rank has whole."""
    base = SHORT + QUERIES + f"--save {tmp_path}/base --train-iters 1 "
    run(1, base, tmp_path)
    flags = GPT2 + f"--lora-rank 2 --pretrained-checkpoint {tmp_path}/base --lr 0.1 "
    require_equal(run(2, flags + how, tmp_path), run(1, flags, tmp_path))


@ranks(2, timeout=120)
def test_all_ranks_have_the_same_whole_layers():
    with built_run(SHORT + QUERIES + TP2 + SP) as of_two:
        model = of_two.trainer.sharding.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        partial = {names[id(each)] for each in partial_parameters(model, True)}
        for layer in ("q_down", "kv_down", "q_down_norm", "kv_down_norm"):
            assert f"blocks.0.attention.{layer}.weight" in partial
        assert "blocks.0.attention.kv_up.weight" not in partial
        with of_two.batches.loader(TRAIN, 0) as batches:
            for _ in range(2):
                of_two.trainer.step(batches)
        whole = model.blocks[0].attention.kv_down.weight.detach()
        everywhere = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(everywhere, whole.contiguous())
        assert torch.equal(*everywhere)
