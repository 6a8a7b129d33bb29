"""What ranks send along the axes is what the formula says, to the byte."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.train.inputs import TRAIN
from tests.megatron_zpp.parallel.flags import (
    CP2,
    CP4,
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

SIZES = (
    "--num-layers 4 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --log-interval 9 "
)
FULL = "--recompute-granularity full "


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
    path = tmp_path / f"{dist.get_rank()}.json"
    path.write_text(json.dumps({"zeropp": {"ranks_per_node": 2}}))
    with built_run(f"{SIZES} {flags} --deepspeed_config {path}") as run:
        with run.batches.loader(TRAIN, 0) as batches:
            for _ in range(2):
                run.trainer.step(batches)
        counted = run.trainer.communication.take()
    assert counted.sent == counted.expected
    names = {"tensor-model": "tensor", "context": "context", "pipeline-model": "pipeline"}
    axes = {axis for name, axis in names.items() if f"--{name}-parallel-size" in flags}
    assert axes <= {purpose for (purpose, _), num_bytes in counted.sent.items() if num_bytes}
