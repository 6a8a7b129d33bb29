"""What ranks send along the axes is what the formula says, to the byte."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.monitor.communication import Communication
from megatron_zpp.train.inputs import TRAIN
from tests.megatron_zpp.parallel.flags import (
    CP2,
    CP4,
    EP2,
    EP4,
    GATHERED,
    NO_DROPOUT,
    ONE_GROUP,
    PP2,
    SP,
    TP2,
    TP4,
    TWO_STAGES,
)
from tests.megatron_zpp.train.training_runs import built_run
from tests.ranks import ranks
from zeropp.wire.traffic import HOPS

SIZES = (
    "--num-layers 4 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --log-interval 9 "
)
FULL = "--recompute-granularity full "
# All experts compute each token, so that what crosses is known.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 4 --swiglu --disable-bias-linear --moe-layer-freq 2 "
    "--zero-stage 3 --global-batch-size 16 --expert-model-parallel-size "
)


@pytest.mark.parametrize(
    "flags",
    [
        TP2 + CP2 + FULL + NO_DROPOUT + ONE_GROUP + "--untie-embeddings-and-output-weights",
        TP2 + SP + PP2 + FULL + NO_DROPOUT + "--recompute-method block --recompute-num-layers 1",
        TP2 + PP2 + FULL + "--recompute-num-layers 3 --fp16",
        CP2 + PP2 + TWO_STAGES + "--bf16 --fp32-residual-connection",
        CP4 + "--num-query-groups 2 --recompute-granularity selective",
        CP2 + GATHERED + FULL + "--num-query-groups 2 --global-batch-size 8",
        TP4 + "--swiglu --disable-bias-linear --zero-stage 0 --num-query-groups 2",
    ],
)
@ranks(4, timeout=120)
def test_the_ledger_is_the_forecast(flags: str, tmp_path: Path) -> None:
    counted = counted_of_steps(flags, tmp_path)
    assert counted.sent == counted.expected
    names = {"tensor-model": "tensor", "context": "context", "pipeline-model": "pipeline"}
    axes = {axis for name, axis in names.items() if f"--{name}-parallel-size" in flags}
    assert axes <= {purpose for (purpose, _), num_bytes in counted.sent.items() if num_bytes}


@pytest.mark.parametrize(
    ("flags", "ranks_per_node"),
    [
        (EXPERTS + "4 --moe-dispatch-bits 8 --bf16 --num-layers 2 " + FULL, 2),
        (EXPERTS + "4 --moe-shared-expert-intermediate-size 16", 1),
        (EXPERTS + "2 " + PP2 + FULL, 2),
        (EXPERTS + "2 " + PP2, 1),
    ],
)
@ranks(4, timeout=120)
def test_tokens_cross_as_foretold(flags: str, ranks_per_node: int, tmp_path: Path) -> None:
    counted = counted_of_steps(NO_DROPOUT + flags, tmp_path, ranks_per_node)
    for hop in HOPS:
        assert counted.sent["expert", hop] == counted.expected["expert", hop]


MOE = (
    NO_DROPOUT + "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --swiglu "
    "--disable-bias-linear --moe-layer-freq [0]+[1]*3 --moe-router-force-load-balancing "
    "--zero-stage 3 --global-batch-size 8 "
)
GROUPS_OF_2 = FULL + "--recompute-num-layers 2 --zero-stage 3 --global-batch-size 8 "


@pytest.mark.parametrize(
    "flags", [EP2 + FULL, EP2 + GROUPS_OF_2, EP4 + TP2 + SP + FULL, GROUPS_OF_2 + "--bf16"]
)
@ranks(4, timeout=120)
def test_what_is_recomputed_gathers_nothing_more(flags: str, tmp_path: Path) -> None:
    """Also of experts and of groups of blocks, whose forward passes begin again in backward."""
    counted = counted_of_steps(MOE + flags if "expert" in flags else flags, tmp_path)
    for key, num_bytes in counted.sent.items():
        if key[0] != "expert":
            assert num_bytes == counted.expected[key], key


def counted_of_steps(flags: str, folder: Path, ranks_per_node: int = 2) -> Communication:
    """What two steps sent."""
    path = folder / f"{dist.get_rank()}.json"
    path.write_text(json.dumps({"zeropp": {"ranks_per_node": ranks_per_node}}))
    with built_run(f"{SIZES} {flags} --deepspeed_config {path}") as run:
        with run.batches.loader(TRAIN, 0) as batches:
            for _ in range(2):
                run.trainer.step(batches)
        return run.trainer.communication.take()
