"""Random mixtures of experts on nodes that step alone, stop, and go on on other nodes and ranks.

Set RANDOM_EXPERTS to draw more runs than the suite does.
"""

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
from tests.megatron_zpp.parallel.test_random_experts import RUNS, Drawn
from tests.megatron_zpp.train.stopped_runs import require_same_buffers
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

OF_TWO = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]  # ranks of the axes, of two
NODES = [(2, 1), (4, 2), (4, 2), (4, 1)]  # all ranks, and those of a node
TOGETHER = [(1, 1), (2, 2), (4, 4)]
MEANS = "means.pickle"


class Biased(Drawn):
    """A mixture whose routers most often have a bias that moves."""

    scores = ("sigmoid", "sqrtsoftplus")


class Local(Biased):
    """A mixture, and nodes of some ranks that step alone."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, OF_TWO)
        self.model += "--train-iters 6 --override-opt_param-scheduler "
        draw = self.draw
        self.stop = draw.randint(1, 5)
        self.before, self.after = draw.choice(NODES), draw.choice([*NODES, *TOGETHER])
        is_same = self.nodes_of(self.before) == self.nodes_of(self.after)
        self.sync = {
            "sync_every": draw.choice([2, 3, {"0": 1, "2": 3}]),
            "sync_bits": 32,
            "outer_lr": draw.choice([0.7, 1.0]),
            # Of other parts of the weights, momentum starts anew.
            "outer_momentum": 0.0 if is_same else draw.choice([0.0, 0.5]),
        }

    @staticmethod
    def nodes_of(size: tuple[int, int]) -> int:
        return size[0] // size[1]

    @property
    def has_replicas(self) -> bool:
        """Whether a node of two ranks has two replicas, which compute two micro-batches at once."""
        return self.tensor * self.context * self.pipe == 1

    def balance(self) -> list[str]:
        return [] if self.has_replicas else super().balance()  # which are of a micro-batch

    def capacity(self) -> list[str]:
        return [] if self.has_replicas else super().capacity()

    def run(self, size: tuple[int, int], folder: Path, flags: str) -> str:
        """Return the log of a run on ranks of nodes."""
        num_ranks, world = size
        axes = self.axes(world) if world > 1 else ""
        stage = self.draw.randint(1 if world > 1 else 0, 3)
        return self._run(size, folder, f"{axes} {flags}", stage)

    def run_on_one_rank_each(self, size: tuple[int, int], folder: Path, flags: str) -> str:
        """Return the log of a run on as many nodes of one rank each, which see the same samples."""
        nodes = self.nodes_of(size)
        if self.has_replicas and nodes > 1 and size[1] > 1:
            flags += " --micro-batch-size 2"
        return self._run((nodes, 1), folder, flags, 0)

    def _run(self, size: tuple[int, int], folder: Path, flags: str, stage: int) -> str:
        num_ranks, world = size
        zeropp = {"ranks_per_node": world, **(self.sync if num_ranks > world else {})}
        flags = f"{self.model} {flags} {with_json({'stage': stage}, **zeropp)}"
        print(size, flags)
        if num_ranks > world:
            return run_alone(num_ranks, world, flags, folder)
        return run(num_ranks, flags, folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("seed", range(max(1, RUNS // 2)))
def test_nodes_that_stop_are_like_nodes_of_one_rank(seed: int, tmp_path: Path) -> None:
    """They go on on other nodes and ranks; weights and buffers are then means of all nodes."""
    drawn = Local(4000 + seed)
    saves = f"--save {tmp_path}/%s --exit-interval {drawn.stop}"
    goes_on = f"--load {tmp_path}/%s --save {tmp_path}/%s_end"
    own = drawn.run(drawn.before, tmp_path, saves % "own")
    expected = drawn.run_on_one_rank_each(drawn.before, tmp_path, saves % "one")
    require_equal(own, expected)
    name = checkpoint_name(drawn.stop)
    require_means(drawn, tmp_path / "own" / name, drawn.nodes_of(drawn.before))
    require_same_buffers(tmp_path / "own", tmp_path / "one")
    own = drawn.run(drawn.after, tmp_path, goes_on % ("own", "own"))
    expected = drawn.run_on_one_rank_each(drawn.after, tmp_path, goes_on % ("one", "one"))
    assert len(losses(own)) == 6 - drawn.stop
    require_equal(own, expected)
    require_same_buffers(tmp_path / "own_end", tmp_path / "one_end")
    nodes = drawn.nodes_of(drawn.after)
    for node in range(1, nodes):  # as the last outer step has made them
        end = checkpoint_name(6)
        first, other = (
            read(folder_of_node(tmp_path / "own_end", each) / end) for each in (0, node)
        )
        assert first.keys() == other.keys()
        assert all(torch.equal(first[each], other[each]) for each in first)


def require_means(drawn: Local, checkpoint: Path, nodes: int) -> None:
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


@pytest.mark.parametrize("seed", range(max(1, RUNS // 2)))
@ranks(3, timeout=120)
def test_nodes_that_join_have_what_an_own_formula_says(seed: int, tmp_path: Path) -> None:
    """One or two nodes begin, and the others join after some steps; all train to the end."""
    folder = shared_folder(str(tmp_path))
    drawn = Biased(6000 + seed, OF_TWO[:1])
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
        trainer.join(run.metrics.history, run.batches)
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
