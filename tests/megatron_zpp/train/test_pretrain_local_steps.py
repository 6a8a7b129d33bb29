"""Runs whose nodes step alone: random models on random sizes of the axes, stops, and joining nodes.

Set RANDOM_LOCAL_STEPS to draw more runs than the suite does.
"""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights
from megatron_zpp.checkpoint.iteration_folders import checkpoint_name, folder_of_node
from megatron_zpp.train.inputs import TRAIN
from megatron_zpp.train.loop import train
from tests.documents import ROOT
from tests.megatron_zpp.train.drawn_runs import BIASED, OF_TWO, Drawn, require_same_buffers
from tests.megatron_zpp.train.training_runs import (
    built_run,
    losses,
    require_equal,
    run,
    run_alone,
    shared_folder,
    tensors_of,
    with_json,
)
from tests.ranks import ranks
from tests.worlds import elastic_nodes, wait_for_joiners
from zeropp import ZeroConfig

RUNS = int(os.environ.get("RANDOM_LOCAL_STEPS", "3"))
KINDS = ("dense", "experts", "muon")
# The first three seeds are of most kinds, axes and numbers of nodes.
OF_INTERVALS, OF_STOPS, OF_OTHER_NODES = 189, 190, 98
NODES = [(2, 1), (4, 2), (4, 2), (4, 1)]  # all ranks, and those of a node
TOGETHER = [(1, 1), (2, 2), (4, 4)]
ITERATIONS = 6
MEANS = "means.pickle"


class Nodes(Drawn):
    """A model, and nodes of ranks that step alone; losses are those of samples."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, KINDS[seed % 3], OF_TWO, BIASED)
        self.model = self.model.replace("--eod-mask-loss", "")
        self.model += f"--train-iters {ITERATIONS} --override-opt_param-scheduler "
        # Two ranks that share a model may be two nodes, which step together.
        self.ranks_per_node = 2 if self.has_replicas else self.draw.choice([1, 2])

    def zero(self) -> dict:
        return super().zero() | {"stage": self.draw.randint(1, 3)}

    def overlap(self) -> dict:
        """In how many fragments weights are exchanged, and how many steps that takes."""
        delay = self.draw.choice([0, 1])
        return {"sync_fragments": self.draw.randint(1, 5), "sync_delay": delay, "sync_mixing": 0.3}


@pytest.mark.parametrize("seed", range(OF_INTERVALS, OF_INTERVALS + RUNS))
def test_an_interval_of_one_is_data_parallelism(seed: int, tmp_path: Path) -> None:
    """Nodes that average gradients in each step print the numbers of one data axis."""
    drawn = Nodes(seed)
    flags, blocks = drawn.model + drawn.axes(2), {"ranks_per_node": 2, "muon_blocks": "whole"}
    expected = run(4, flags + with_json(drawn.zero(), **blocks), tmp_path)
    alone = {"sync_every": {"0": 1, "100": 2}, "sync_bits": 32}
    json_flags = with_json(drawn.zero(), **blocks, **alone)
    require_equal(run_alone(4, 2, flags + json_flags, tmp_path), expected)


@pytest.mark.parametrize("seed", range(OF_STOPS, OF_STOPS + RUNS))
def test_a_stop_within_an_interval_loses_no_digit(seed: int, tmp_path: Path) -> None:
    """Everything is quantized, and the run stops after some iteration."""
    drawn = Nodes(seed)
    draw, zero = drawn.draw, drawn.zero()
    zeropp = {
        "ranks_per_node": drawn.ranks_per_node,
        "sync_every": draw.choice([2, 3, {"0": 1, "2": 3}]),
        "sync_bits": draw.choice([2, 4, 8]),
        "sync_feedback": draw.choice([None, True]),
        **drawn.overlap(),
    }
    if zero["stage"] == 3:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    flags = drawn.model + drawn.axes(2) + with_json(zero, **zeropp)
    straight = losses(run_alone(4, 2, flags, tmp_path))
    saved, stop = tmp_path / "saved", draw.randint(1, ITERATIONS - 1)
    first = run_alone(4, 2, f"{flags} --save {saved} --exit-interval {stop}", tmp_path)
    second = run_alone(4, 2, f"{flags} --load {saved}", tmp_path)
    assert losses(first) + losses(second) == straight != []


class Moved(Nodes):
    """Nodes that stop, and others that go on with what these have saved."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.draw
        self.stop = draw.randint(1, ITERATIONS - 1)
        self.before, self.after = draw.choice(NODES), draw.choice([*NODES, *TOGETHER])
        is_same = nodes_of(self.before) == nodes_of(self.after)
        # Else ranks of a node cut their own parts of the weights into fragments.
        is_whole = is_same and self.tensor * self.pipe == 1 and not self.experts
        self.sync = {
            "sync_every": draw.choice([2, 3, {"0": 1, "2": 3}]),
            "sync_bits": 32,
            "outer_lr": draw.choice([0.7, 1.0]),
            # Of other parts of the weights, momentum starts anew.
            "outer_momentum": draw.choice([0.0, 0.5]) if is_same else 0.0,
            "sync_on_host": draw.random() < 0.3,
            **(self.overlap() if is_whole else {}),
        }

    def run(self, size: tuple[int, int], folder: Path, flags: str) -> str:
        """Return the log of a run on ranks of nodes."""
        axes = self.axes(size[1]) if size[1] > 1 else ""
        return self._run(size, folder, f"{axes} {flags}", self.zero() if size[1] > 1 else {})

    def run_on_one_rank_each(self, size: tuple[int, int], folder: Path, flags: str) -> str:
        """Return the log of a run on as many nodes of one rank each, which see the same samples."""
        nodes = nodes_of(size)
        if self.has_replicas and nodes > 1 and size[1] > 1:
            flags += " --micro-batch-size 2"
        return self._run((nodes, 1), folder, flags, {})

    def _run(self, size: tuple[int, int], folder: Path, flags: str, zero: dict) -> str:
        num_ranks, world = size
        zeropp = {"ranks_per_node": world, "muon_blocks": "whole"}
        zeropp |= self.sync if num_ranks > world else {}
        flags = f"{self.model} {flags} {with_json({'stage': 0} | zero, **zeropp)}"
        print(size, flags)
        if num_ranks > world:
            return run_alone(num_ranks, world, flags, folder)
        return run(num_ranks, flags, folder)


def nodes_of(size: tuple[int, int]) -> int:
    return size[0] // size[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("seed", range(OF_OTHER_NODES, OF_OTHER_NODES + RUNS))
def test_nodes_that_stop_are_like_nodes_of_one_rank(seed: int, tmp_path: Path) -> None:
    """They go on on other nodes and ranks; weights and buffers are then means of all nodes."""
    drawn = Moved(seed)
    saves = f"--save {tmp_path}/%s --exit-interval {drawn.stop}"
    goes_on = f"--load {tmp_path}/%s --save {tmp_path}/%s_end"
    own = drawn.run(drawn.before, tmp_path, saves % "own")
    expected = drawn.run_on_one_rank_each(drawn.before, tmp_path, saves % "one")
    require_equal(own, expected)
    name = checkpoint_name(drawn.stop)
    require_means(drawn, tmp_path / "own" / name, nodes_of(drawn.before))
    require_same_buffers(tmp_path / "own", tmp_path / "one")
    own = drawn.run(drawn.after, tmp_path, goes_on % ("own", "own"))
    expected = drawn.run_on_one_rank_each(drawn.after, tmp_path, goes_on % ("one", "one"))
    assert len(losses(own)) == ITERATIONS - drawn.stop
    require_equal(own, expected)
    require_same_buffers(tmp_path / "own_end", tmp_path / "one_end")
    for node in range(1, nodes_of(drawn.after)):  # as the last outer step has made them
        end = checkpoint_name(ITERATIONS)
        first, other = (
            read(folder_of_node(tmp_path / "own_end", each) / end) for each in (0, node)
        )
        assert first.keys() == other.keys()
        assert all(torch.equal(first[each], other[each]) for each in first)


def require_means(drawn: Moved, checkpoint: Path, nodes: int) -> None:
    """Require the means over nodes in what is exported, and where one rank goes on."""
    of_nodes = [
        read(folder_of_node(checkpoint.parent, node) / checkpoint.name) for node in range(nodes)
    ]
    expected = {
        name: (sum(each[name].double() for each in of_nodes) / nodes).to(first.dtype)
        for name, first in of_nodes[0].items()
    }
    exported = CheckpointWeights(checkpoint)
    assert {*exported.facts()} == {*expected}
    for name, mean in expected.items():
        torch.testing.assert_close(exported.read(name), mean, rtol=0, atol=0)
    (checkpoint.parent / MEANS).write_bytes(pickle.dumps(expected))
    require_beginning(flags=drawn.model, folder=checkpoint.parent)


@ranks(1, timeout=120)
def require_beginning(flags: str, folder: Path) -> None:
    """Require the means in a run that goes on from a folder."""
    expected = pickle.loads((folder / MEANS).read_bytes())
    with built_run(f"{flags} --load {folder}") as built:
        for name, each in tensors_of(built).items():
            torch.testing.assert_close(each, expected[name], rtol=0, atol=0)


def read(checkpoint: Path) -> dict[str, Tensor]:
    """Return the model's tensors in a checkpoint, as PyTorch reads them."""
    reader = dcp.FileSystemReader(checkpoint)
    facts = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in facts.items()
        if isinstance(each, TensorStorageMetadata) and name.startswith("model.")
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): each for name, each in tensors.items()}


@pytest.mark.parametrize("seed", range(max(1, RUNS // 3)))
@ranks(3, timeout=120)
def test_nodes_that_join_have_what_an_own_formula_says(seed: int, tmp_path: Path) -> None:
    """One or two nodes begin, and the others join after some steps; all train to the end."""
    folder = shared_folder(str(tmp_path))
    drawn = Drawn(6000 + seed, "experts", OF_TWO[:1], BIASED)
    draw, nodes = drawn.draw, drawn.draw.randint(1, 2)
    rate, momentum = draw.choice([0.7, 1.0]), draw.choice([0.0, 0.5])
    every = draw.choice([50, {"0": 1, "1": 50}])  # with a first step that they take together
    elastic = {"sync_store": "localhost:1", "sync_nodes": nodes, "sync_every": every}
    elastic |= {"sync_bits": 32, "outer_lr": rate, "outer_momentum": momentum}
    zero = {"stage": draw.randint(0, 3)}
    flags = f"{drawn.model} --global-batch-size {4 * nodes} {with_json(zero, **elastic)} "
    flags += "--dataloader-type cyclic --train-iters 5 "
    steps = draw.randint(2, 3)
    with elastic_nodes(folder, 0, nodes) as outer, built_run(flags, outer) as run:
        trainer, begun = run.trainer, tensors_of(run)
        joins, local = outer.joins, trainer.ranks.replicas.steps
        run.ranks.replicas.join(run)
        if not joins:
            with run.batches.loader(TRAIN, 0) as batches:
                for _ in range(steps):
                    trainer.step(batches)
                    begun = tensors_of(run) if local.is_alike else begun
            content = pickle.dumps((begun, tensors_of(run)))
            (folder / f"node{outer.node}").write_bytes(content)
            wait_for_joiners(outer, 3 - nodes)
            local.synchronize(steps)
        assert trainer.counters.iteration == steps, flags
        of_nodes = [pickle.loads((folder / f"node{node}").read_bytes()) for node in range(nodes)]
        for name, now in tensors_of(run).items():
            agreed, *others = (each[name] for each, _ in of_nodes)
            assert all(torch.equal(each, agreed) for each in others)
            mean = sum(each[name].double() for _, each in of_nodes) / nodes
            if not name.endswith("expert_bias"):
                mean = agreed - rate * (1 + momentum) * (agreed - mean)
            torch.testing.assert_close(now, mean.to(now.dtype), rtol=1e-5, atol=1e-6)
        train(run)
        values = [each.double().sum().item() for each in tensors_of(run).values()]
        assert local.sum(lambda place, size: values) == pytest.approx(
            [3 * each for each in values], rel=1e-15, abs=0
        )


def test_the_example_of_two_nodes_runs(tmp_path: Path) -> None:
    path = ROOT / "examples/ds_local_steps_two_nodes.json"
    for each in (path, ROOT / "examples/ds_local_steps_elastic.json"):
        assert not ZeroConfig.from_json(each).notices()
    flags = f"--deepspeed_config {path} --micro-batch-size 2 --global-batch-size 8 --train-iters 2"
    assert len(losses(run_alone(4, 2, flags, tmp_path))) == 2


def test_without_moments_nodes_go_on_from_equal_weights(tmp_path: Path) -> None:
    """A restart takes the weights for those that nodes have agreed on."""
    flags = Nodes(300).model + with_json({"stage": 0}, ranks_per_node=1, sync_every=3)
    saved = tmp_path / "saved"
    run_alone(2, 1, f"{flags} --save {saved} --exit-interval 2", tmp_path)
    log = run_alone(2, 1, f"{flags} --load {saved} --no-load-optim", tmp_path)
    assert "replicas go on with the mean of their weights" in log
    assert len(losses(log)) == ITERATIONS - 2
