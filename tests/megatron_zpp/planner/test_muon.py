"""What the planner says of Muon: the bytes are the ledger's, the peak is that of real steps."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.shared.training_setup import largest_of_ranks
from megatron_zpp.planner.candidates import given_candidate
from megatron_zpp.planner.estimate import estimate
from megatron_zpp.planner.parts.planned_optimizer import Turn
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import Description, Protocol, Rates, find_cluster
from megatron_zpp.planner.timing.optimizer_time import seconds_of_turns
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.build import run_facts
from megatron_zpp.train.inputs import TRAIN
from tests.megatron_zpp.parallel.flags import EP2, EP4, NO_DROPOUT, PP2, SP, TP2, TWO_STAGES
from tests.megatron_zpp.train.training_runs import built_run
from tests.ranks import ranks
from zeropp.optim.sharded_optimizer import OPTIMIZER
from zeropp.wire.traffic import HOPS

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --swiglu "
    "--disable-bias-linear --micro-batch-size 1 --global-batch-size 4 --log-interval 9 "
    "--optimizer muon --train-iters 4 " + NO_DROPOUT
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq 2 "
ZERO3 = {"stage": 3}
QUANTIZED = {"stage": 3, "zero_quantized_gradients": True}
WHOLE, EVERY = {"muon_blocks": "whole"}, {"muon_whole_every": 2}


@pytest.mark.parametrize(
    ("flags", "zero", "muon"),
    [
        ("", ZERO3, {}),
        ("--bf16 ", {"stage": 1}, {"ranks_per_node": 1} | WHOLE),
        ("--muon-fp32-matmul-prec highest ", ZERO3, WHOLE),
        ("", QUANTIZED, EVERY),
        (TP2 + SP, ZERO3, WHOLE),
        (TP2 + "--num-query-groups 1 --muon-no-split-qkv ", ZERO3, {"ranks_per_node": 4}),
        (TP2 + "--num-query-groups 1 ", ZERO3, {"ranks_per_node": 4}),
        (PP2 + TWO_STAGES, QUANTIZED, WHOLE),
        (EXPERTS + EP2, QUANTIZED, EVERY),
        (EXPERTS + EP2 + PP2, ZERO3, {"ranks_per_node": 1} | WHOLE),
        (EXPERTS + EP4 + TP2 + SP, ZERO3, WHOLE),
    ],
)
@ranks(4, timeout=120)
def test_the_ledger_is_the_forecast(flags: str, zero: dict, muon: dict, tmp_path: Path) -> None:
    """Of two steps, one of which has whole matrices if every second one does."""
    path = tmp_path / f"{dist.get_rank()}.json"
    zeropp = {"ranks_per_node": 2} | muon
    path.write_text(json.dumps({"zero_optimization": zero, "zeropp": zeropp}))
    with built_run(f"{MODEL}{flags} --deepspeed_config {path}") as run:
        with run.batches.loader(TRAIN, 0) as batches:
            for _ in range(2):
                run.trainer.step(batches)
        counted = run.trainer.communication.take()
        vocab_size = run.tokenizer.vocab_size
        foretold = estimate(run.config, vocab_size, run.ranks.nodes, is_cpu=True)
        busiest = largest_of_ranks(run.trainer.optimizer.flops(), torch.device("cpu"))
        assert run_facts(run, ()).optimizer_flops == run.trainer.optimizer.flops() > 0
    sent = {hop: counted.sent[OPTIMIZER, hop] / 2 for hop in HOPS}
    assert sent == {hop: foretold.sent[OPTIMIZER, hop] for hop in HOPS}
    assert any(sent.values())
    if not muon.keys() & EVERY.keys():
        assert foretold.optimizer_flops == busiest


def test_the_plan_adds_what_muon_takes_to_the_time_of_adam() -> None:
    """Blocks of nodes send nothing across; whole matrices wait for the slow link."""
    cluster = find_cluster(Description(cluster="dgx-a100", num_nodes=2, link="1gbit"))
    flags = f"{MODEL} --bf16 --tokenizer-type NullTokenizer --vocab-size 511 --seq-length 128 "
    rows = {}
    for name in ("adam", "node", "whole"):
        settings = {"zero_optimization": ZERO3, "zeropp": {"muon_blocks": name}}
        chosen = f"--deepspeed-config {json.dumps(settings, separators=(',', ':'))}"
        if name == "adam":
            chosen = "--optimizer adam --zero-stage 3"
        words = f"{flags} --global-batch-size 16 {chosen}".split()
        searched = Search(parse(words, cluster.num_ranks), 512, cluster)
        rows[name] = searched.row(given_candidate(searched.base))
    adam, node, whole = (rows[name] for name in ("adam", "node", "whole"))
    for row in (node, whole):
        assert row.time.typical - adam.time.typical == pytest.approx(row.time.optimizer)
        assert row.sent_in_m["in_node"] - adam.sent_in_m["in_node"] == pytest.approx(
            row.optimizer_in_m["in_node"]
        )
    assert node.optimizer_in_m["across_nodes"] == 0 < whole.optimizer_in_m["across_nodes"]
    assert whole.time.optimizer > node.time.optimizer > 0 == adam.time.optimizer


RATES = Rates(
    products=1e3,
    half_width=0.0,
    memory=1.0,
    near=10.0,
    far=1.0,
    protocols=(Protocol(start=0.0, near=0.0, far=0.0, share=1.0),),
)


def test_rounds_are_computed_while_others_are_on_their_way() -> None:
    """Rounds of 2 s on their way, each time, and of 5 s of the busiest of two ranks."""
    sides = (8, 8)
    work = Counter({sides: 5000}), Counter({sides: 3000})
    of_links = Turn(near_bytes=20.0, far_bytes=0.0, work=work)
    assert seconds_of_turns([of_links], RATES) == pytest.approx(2 + 5 + 2)
    assert seconds_of_turns(3 * [of_links], RATES) == pytest.approx(2 + 3 * 5 + 2)
    slow = Turn(near_bytes=20.0, far_bytes=8.0, work=work)
    # There, the second there, the first back, the second back: the link is never free.
    assert seconds_of_turns(2 * [slow], RATES) == pytest.approx(4 * 8)
