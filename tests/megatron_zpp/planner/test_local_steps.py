"""What a plan says of nodes that step alone is what runs keep and send."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from megatron_zpp.commands.pretrain import main
from megatron_zpp.planner.activations import LiveBytes
from megatron_zpp.planner.run_forecast import AGREED, EXCHANGE, OUTER_STATE, RunForecast
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.parallel.flags import CP2, EP2, PP2
from tests.megatron_zpp.train.training_runs import TINY, built_run, shared_folder, with_json
from tests.ranks import ranks
from tests.worlds import worlds
from zeropp.wire.rank_group import Nodes

BATCH = "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 "
WIDE = "--hidden-size 256 --num-layers 4"
OUTER = "outer", "across_nodes"


def flags_of(stage: int, **zeropp: object) -> str:
    values = {"ranks_per_node": 2, "sync_every": {"0": 1, "9": 4}} | zeropp
    return BATCH + with_json({"stage": stage}, **values)


@pytest.mark.parametrize(("stage", "bits", "tensor"), [(0, 4, 1), (1, 32, 1), (3, 2, 1), (2, 8, 2)])
@ranks(4)
def test_agreed_weights_and_messages(stage: int, bits: int, tensor: int, tmp_path: Path) -> None:
    flags = flags_of(stage, sync_bits=bits, sync_feedback=True if bits == 4 else None)
    flags += f"--tensor-model-parallel-size {tensor} "
    config = parse(f"{TINY} --mock-data {flags}".split(), 4)
    memory = RunForecast.of(config, 56, Nodes.of(range(4), 2), is_cpu=True)
    assert memory.replicas.num_replicas == 2
    with worlds(2, shared_folder(str(tmp_path))) as outer, built_run(flags, outer) as run:
        local_steps, meter = run.ranks.replicas.steps, run.trainer.communication
        assert memory.sent[OUTER] == pytest.approx(meter.forecast[OUTER], rel=1e-9)
        fragments = local_steps.fragments
        agreed = outer.gather(sum(x.nbytes for each in fragments for x in each.agreed))
        means = [each.mean for each in fragments]
        owned = [x for each in means for x in (each.error, *each.unsent)]
        owned += [each.momentum for each in fragments]
        kept = outer.gather(sum(each.nbytes for each in owned))
    assert memory.host.get(AGREED) in agreed, (memory.host, agreed)
    assert memory.host.get(OUTER_STATE) in kept


MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear "
LAYOUTS = (
    # Over three ranks shards have several lengths, as have the fragments.
    (6, 3, "--zero-stage 3 --hidden-size 40 --ffn-hidden-size 50", {"sync_fragments": 3}),
    (6, 3, "--zero-stage 0 --hidden-size 40 --ffn-hidden-size 50", {"sync_fragments": 5}),
    (4, 2, f"--zero-stage 1 {PP2}", {"sync_fragments": 2, "sync_delay": 1}),
    (4, 1, f"--zero-stage 1 {PP2}", {"sync_bits": 2}),  # a model takes two nodes
    (4, 2, f"--zero-stage 3 {MOE}{EP2}", {"sync_bits": 8}),
    (4, 2, f"--zero-stage 2 {CP2}", {"muon_whole_every": 2}),
)


@pytest.mark.parametrize(("count", "per_node", "flags", "settings"), LAYOUTS)
def test_messages_are_those_that_runs_expect(
    count: int, per_node: int, flags: str, settings: dict, tmp_path: Path
) -> None:
    {4: messages_of_4, 6: messages_of_6}[count](
        per_node=per_node, flags=flags, settings=settings, folder=tmp_path
    )


@ranks(4)
def messages_of_4(per_node: int, flags: str, settings: dict, folder: Path) -> None:
    require_messages(4, per_node, flags, settings, folder)


@ranks(6)
def messages_of_6(per_node: int, flags: str, settings: dict, folder: Path) -> None:
    require_messages(6, per_node, flags, settings, folder)


def require_messages(count: int, per_node: int, flags: str, settings: dict, folder: Path) -> None:
    """Require that exchanges are planned as they are, to the byte before they are coded."""
    zeropp = {"ranks_per_node": per_node, "sync_every": 4, **settings}
    optimizer = {"optimizer": {"type": "Muon"}} if "muon_whole_every" in settings else {}
    size = "--micro-batch-size 1 --global-batch-size 12 --train-iters 2"
    flags = f"{size} {flags} {with_json(more=optimizer, **zeropp)}"
    config = parse(f"{TINY} --mock-data {flags}".split(), count)
    foretold = RunForecast.of(config, 56, Nodes.of(range(count), per_node), is_cpu=True)
    with worlds(foretold.replicas.nodes.num_ranks, shared_folder(str(folder))) as outer:
        with built_run(flags, outer) as run:
            sent = run.trainer.communication.forecast
    assert foretold.sent[OUTER] == pytest.approx(sent[OUTER], rel=1e-12)
    across = {key: sent[key] for key in sent if key[1] == "across_nodes" and key != OUTER}
    assert across == pytest.approx({key: foretold.sent.get(key, 0.0) for key in across})
    assert per_node == 1 or not any(across.values())


def test_exchanges_beside_steps_have_their_buffers_in_steps(tmp_path: Path) -> None:
    found = []
    for own in ({}, {"sync_delay": 3}, {"sync_delay": 5}):
        flags = flags_of(3, **{"sync_every": 8, "sync_fragments": 4, **own})
        config = parse(f"{TINY} --mock-data {flags}".split(), 4)
        memory = RunForecast.of(config, 56, Nodes.of(range(4), 2), is_cpu=True)
        planned, run = memory.replicas, memory.first
        found.append(planned.buffers_beside_steps(run))
        assert memory.host.get(EXCHANGE, 0) == found[-1]
    whole = planned.buffer_bytes(run)  # a fragment begins every 2 steps
    assert found == [0, whole * 2 // 4, whole * 3 // 4]


@pytest.mark.parametrize(
    ("own", "num_ranks", "lines"),
    [
        ({"sync_every": 4, "sync_store": "10.0.0.1:29400", "sync_nodes": 3}, 4,
         ["3 that train independently, synchronized every 4 steps in 4 bits",
          "1 micro-batches of 1 samples of 16 tokens on each of 4 ranks"]),
        ({}, 6, ["synchronized every step, every 4 steps after step 9 in 4 bits",
                 "2 micro-batches of 1 samples of 16 tokens on each of 2 ranks"]),
    ],
)  # fmt: skip
def test_the_dry_run_is_of_one_node_or_launch(own, num_ranks, lines, capsys) -> None:
    flags = flags_of(3, **own) + f"--global-batch-size 12 --dry-run --dry-run-ranks {num_ranks}"
    assert main(f"{TINY} --mock-data {flags}".split()) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in (*lines, "3 that train", AGREED, OUTER_STATE))


@pytest.mark.parametrize(("bits", "nodes"), [(4, 2), (32, 2), (4, 4), (2, 2)])
def test_the_buffers_of_an_exchange_are_at_most_what_is_foretold(
    bits: int, nodes: int, tmp_path: Path
) -> None:
    {2: on_2_nodes, 4: on_4_nodes}[nodes](bits=bits, folder=tmp_path)


@ranks(2)
def on_2_nodes(bits: int, folder: Path) -> None:
    require_buffers(bits, 2, folder)


@ranks(4)
def on_4_nodes(bits: int, folder: Path) -> None:
    require_buffers(bits, 4, folder)


def require_buffers(bits: int, nodes: int, folder: Path) -> None:
    """Require that an exchange on this thread needs what is foretold, and not a fifth less."""
    flags = flags_of(3, sync_bits=bits, ranks_per_node=1) + WIDE
    config = parse(f"{TINY} --mock-data {flags}".split(), nodes)
    memory = RunForecast.of(config, 56, Nodes.of(range(nodes), 1), is_cpu=True)
    with worlds(1, folder) as outer, built_run(flags, outer) as run:
        local_steps = run.ranks.replicas.steps
        for weight in local_steps.weights.read():
            weight.add_(0.01 * torch.randn_like(weight))
        outer.start = at_once
        with LiveBytes() as live:
            local_steps.after_update(13)
        means = [each.mean for each in local_steps.fragments]
        unsent = sum(x.nbytes for mean in means for x in mean.unsent if x.any())
    # It sees the weights and the agreed ones, too, and what takes the place of what was unsent.
    measured = live.peak - 2 * memory.host[AGREED] - unsent
    foretold = memory.replicas.buffer_bytes(memory.first)
    assert measured <= 1.01 * foretold <= 1.2 * measured, (measured, foretold)  # padding


def at_once(work: Callable) -> Future:
    """Do work of another thread on this one, whose tensors are seen."""
    done: Future = Future()
    done.set_result(work())
    return done
