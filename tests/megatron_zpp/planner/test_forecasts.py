"""What steps send is what is forecast, by the run itself and by a plan of ranks not there."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from benchmarks.shared.training_setup import largest_of_ranks
from megatron_zpp.planner.parts.planned_run import plan_run
from megatron_zpp.planner.run_forecast import RunForecast
from megatron_zpp.train.build import run_facts
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
from tests.megatron_zpp.train.training_runs import built_run, with_json
from tests.ranks import ranks
from zeropp.optim.sharded_optimizer import OPTIMIZER
from zeropp.sharding.plan import Plan
from zeropp.wire.traffic import HOPS

SIZES = (
    "--num-layers 4 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --log-interval 9 "
)
FULL = "--recompute-granularity full "
OF_2 = {"ranks_per_node": 2}
OF_1 = {"ranks_per_node": 1}
AXES = [
    TP2 + CP2 + FULL + NO_DROPOUT + ONE_GROUP + "--untie-embeddings-and-output-weights",
    TP2 + SP + PP2 + FULL + NO_DROPOUT + "--recompute-method block --recompute-num-layers 1",
    TP2 + PP2 + FULL + "--recompute-num-layers 3 --fp16",
    CP2 + PP2 + TWO_STAGES + "--bf16 --fp32-residual-connection",
    CP4 + "--num-query-groups 2 --recompute-granularity selective",
    CP2 + GATHERED + FULL + "--num-query-groups 2 --global-batch-size 8",
    TP4 + "--swiglu --disable-bias-linear --zero-stage 0 --num-query-groups 2",
]
GROUPS_OF_2 = FULL + "--recompute-num-layers 2 --zero-stage 3 --global-batch-size 8 "
# All experts compute each token, so that what crosses is known.
EVERY_EXPERT = (
    NO_DROPOUT + "--num-experts 4 --moe-router-topk 4 --swiglu --disable-bias-linear "
    "--moe-layer-freq 2 --zero-stage 3 --global-batch-size 16 "
)
MOE = (
    NO_DROPOUT + "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --swiglu "
    "--disable-bias-linear --moe-layer-freq [0]+[1]*3 --moe-router-force-load-balancing "
    "--zero-stage 3 --global-batch-size 8 "
)
MUON = (
    NO_DROPOUT + "--num-query-groups 2 --swiglu --disable-bias-linear --micro-batch-size 1 "
    "--optimizer muon "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq 2 "
ZERO3 = {"stage": 3}
QUANTIZED = {"stage": 3, "zero_quantized_gradients": True}
WHOLE, EVERY = {"muon_blocks": "whole"}, {"muon_whole_every": 2}


def counted_of_steps(flags: str, count: int = 2):
    """A run, and what two of its steps sent."""
    with built_run(SIZES + flags) as run:
        with run.batches.loader(TRAIN, 0) as batches:
            for _ in range(count):
                run.trainer.step(batches)
        return run, run.trainer.communication.take()


@pytest.mark.parametrize("flags", [*AXES, GROUPS_OF_2 + "--bf16"])
@ranks(4, timeout=120)
def test_the_ledger_is_the_forecast(flags: str) -> None:
    """What is recomputed gathers nothing more."""
    _, counted = counted_of_steps(flags + with_json(**OF_2))
    assert counted.sent == counted.expected
    names = {"tensor-model": "tensor", "context": "context", "pipeline-model": "pipeline"}
    axes = {axis for name, axis in names.items() if f"--{name}-parallel-size" in flags}
    assert axes <= {purpose for (purpose, _), num_bytes in counted.sent.items() if num_bytes}


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        (EVERY_EXPERT + EP4 + "--moe-dispatch-bits 8 --bf16 --num-layers 2 " + FULL, OF_2),
        (EVERY_EXPERT + EP4 + "--moe-shared-expert-intermediate-size 16", OF_1),
        (EVERY_EXPERT + EP2 + PP2 + FULL, OF_2),
        (EVERY_EXPERT + EP2 + PP2, OF_1),
        (MOE + EP2 + FULL, OF_2),
        (MOE + EP2 + GROUPS_OF_2, OF_2),
        (MOE + EP4 + TP2 + SP + FULL, OF_2),
    ],
)
@ranks(4, timeout=120)
def test_tokens_cross_as_foretold_and_all_else_to_the_byte(flags: str, nodes: dict) -> None:
    """How many tokens cross is known where each passes all experts."""
    _, counted = counted_of_steps(flags + with_json(**nodes))
    for key, num_bytes in counted.sent.items():
        if key[0] != "expert" or EVERY_EXPERT in flags:
            assert num_bytes == counted.expected[key], key


@pytest.mark.parametrize(
    ("flags", "zero", "muon"),
    [
        ("", ZERO3, {}),
        ("--bf16 ", {"stage": 1}, OF_1 | WHOLE),
        ("--muon-fp32-matmul-prec highest ", ZERO3, WHOLE),
        ("", QUANTIZED, EVERY),
        (TP2 + SP, ZERO3, WHOLE),
        (TP2 + "--num-query-groups 1 --muon-no-split-qkv ", ZERO3, {"ranks_per_node": 4}),
        (TP2 + "--num-query-groups 1 ", ZERO3, {"ranks_per_node": 4}),
        (PP2 + TWO_STAGES, QUANTIZED, WHOLE),
        (EXPERTS + EP2, QUANTIZED, EVERY),
        (EXPERTS + EP2 + PP2, ZERO3, OF_1 | WHOLE),
        (EXPERTS + EP4 + TP2 + SP, ZERO3, WHOLE),
    ],
)
@ranks(4, timeout=120)
def test_muon_sends_and_computes_what_is_foretold(flags: str, zero: dict, muon: dict) -> None:
    """In two steps, one of which has whole matrices if every second one does."""
    run, counted = counted_of_steps(MUON + flags + with_json(zero, **OF_2 | muon))
    foretold = RunForecast.of(run.config, run.tokenizer.vocab_size, run.ranks.nodes, is_cpu=True)
    busiest = largest_of_ranks(run.trainer.optimizer.flops(), torch.device("cpu"))
    assert run_facts(run, ()).optimizer_flops == run.trainer.optimizer.flops() > 0
    sent = {hop: counted.sent[OPTIMIZER, hop] / 2 for hop in HOPS}
    assert sent == {hop: foretold.sent[OPTIMIZER, hop] for hop in HOPS}
    assert any(sent.values())
    for hop in HOPS:
        assert counted.sent[OPTIMIZER, hop] == counted.expected[OPTIMIZER, hop]
    if not muon.keys() & EVERY.keys():
        assert foretold.optimizer_flops == busiest


@pytest.mark.parametrize(
    "flags",
    [
        TP2 + SP + PP2,
        PP2 + TWO_STAGES + "--swiglu --normalization RMSNorm --num-query-groups 2 ",
        CP2 + TP2,
        MOE + EP2,
        MOE + EP4 + TP2 + SP,
        MOE + EP2 + PP2,
    ],
)
@ranks(4, timeout=120)
def test_the_forecast_of_planned_ranks_is_that_of_the_ranks(flags: str) -> None:
    """Also of bytes: what the dry run says of a node is what its ranks expect to send."""
    sizes = "--micro-batch-size 2 --global-batch-size 8 --zero-stage 3 --bf16 "
    with built_run(SIZES + flags + sizes + with_json(ZERO3, **OF_2)) as run:
        config, sharding, ranks = run.config, run.trainer.sharding, run.ranks
        sent = Counter(run.trainer.communication.forecast)  # of the rank's node
        vocab_size = run.tokenizer.vocab_size
    forecast = RunForecast.of(config, vocab_size, ranks.nodes, is_cpu=True)
    of_place = forecast.first.ranks.at(ranks.pipeline_rank)
    planned_run = plan_run(forecast.first.model, of_place, is_cpu=True)
    assert planned_run.num_ranks == 1 or Counter(planned(sharding.plan)) == Counter(
        planned(planned_run.plan)
    )
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, sent)
    for key, num_bytes in sum(everywhere, Counter()).items():
        assert forecast.sent[key] == pytest.approx(num_bytes / 4), key


def planned(plan: Plan) -> list[tuple]:
    """What is planned of each unit, whoever cuts it."""
    return [
        (
            frozenset(Counter(unit.specs).items()),
            unit.is_root,
            unit.regathers,
            unit.axis.weights,
            unit.dtype,
        )
        for unit in plan.units
    ]
