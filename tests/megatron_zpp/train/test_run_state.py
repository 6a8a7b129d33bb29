"""All state of a run is in `run_state.toml`, and each operation does with it what that says."""

import json
import pickle
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_zpp.capabilities.local_sgd.replicas import LocalSGD
from megatron_zpp.checkpoint.iteration_folders import checkpoint_name
from megatron_zpp.checkpoint.training_state import TrainingState
from megatron_zpp.commands import consolidate
from megatron_zpp.train.inputs import TRAIN
from megatron_zpp.train.loop import train
from megatron_zpp.train.run import Run
from tests.documents import ROOT
from tests.megatron_zpp.train.all_of_a_run import all_of, changed
from tests.megatron_zpp.train.training_runs import built_run, with_json
from tests.ranks import ranks
from tests.worlds import elastic_nodes, wait_for_joiners, worlds
from zeropp.checkpoint.rank_values import without_rank
from zeropp.checkpoint.shard_files import saved_tensors
from zeropp.settings.no_effect_tables import read_toml

TABLE = read_toml("megatron_zpp.train", "run_state.toml")["rows"]
OPERATIONS = ("join", "outer step", "average", "resume", "export")
ROWS = {name: dict(zip(OPERATIONS, row, strict=False)) for name, *row in TABLE}
HELD = {name: row[len(OPERATIONS) :] for name, *row in TABLE}
BUFFERS = "persistent buffers, as `expert_bias`"
MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 12 --moe-router-score-function sigmoid "
MIXTURE += "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.03 "
FLAGS = MIXTURE + "--micro-batch-size 1 --global-batch-size 4 --fp16 --initial-loss-scale 1024 "
FLAGS += "--dataloader-type cyclic --use-checkpoint-opt_param-scheduler "


def test_all_that_training_changes_is_in_one_row(tmp_path: Path) -> None:
    train_plainly(folder=tmp_path)
    train_alone(folder=tmp_path)
    train_with_codes(folder=tmp_path)
    places = json.loads((tmp_path / "plain.json").read_text())
    places |= json.loads((tmp_path / "alone.json").read_text())
    places |= json.loads((tmp_path / "codes.json").read_text())
    places |= {f"TrainingState.{each.name}": "state.json" for each in fields(TrainingState)}
    missing, used = [], set()
    for held, where in places.items():
        rows = [
            (name, pattern)
            for name, patterns in HELD.items()
            for pattern in patterns
            if fnmatchcase(held, pattern)
        ]
        used.update(rows)
        if len({name for name, _ in rows}) != 1:
            missing.append(f"{held} (as {where}) is in the rows {rows}")
    assert not missing, missing  # in a row of the table, which says what operations do with it
    written = {(name, pattern) for name, patterns in HELD.items() for pattern in patterns}
    unused = {pattern for _, pattern in written - used}
    # Of other optimizers and models than those above.
    assert unused <= {"frozen parameter", "other buffer", "local.*", "plain.*", "number.*"}


@ranks(2, timeout=120)
def train_plainly(folder: Path) -> None:
    look_at(FLAGS + "--train-iters 3 ", folder, "plain")


@ranks(2, timeout=120)
def train_alone(folder: Path) -> None:
    every = {"sync_every": 3, "sync_bits": 2, "sync_fragments": 2, "sync_delay": 1}
    flags = FLAGS + with_json({}, ranks_per_node=1, **every)
    with worlds(1, folder) as outer:
        look_at(flags + "--train-iters 5 ", folder, "alone", outer)


@ranks(4, timeout=120)
def train_with_codes(folder: Path) -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}
    zero |= {"zero_quantized_gradients": True, "offload_optimizer": {"device": "cpu"}}
    zeropp = {"ranks_per_node": 2, "weight_steps": True, "delayed_param_update": True}
    flags = MIXTURE + "--micro-batch-size 1 --global-batch-size 4 --bf16 --train-iters 4 "
    look_at(flags + with_json(zero, **zeropp), folder, "codes")


def look_at(flags: str, folder: Path, name: str, outer: Any = None) -> None:
    """Leave what training changes, and the names in a checkpoint, in `folder`."""
    with built_run(f"{flags} --save {folder / name}", outer) as run:
        before, last = all_of(run), run.trainer.schedules.length.iterations
        train(run)
        held = changed(before, all_of(run))
        if run.ranks.global_rank == 0:
            names = saved_tensors(folder / name / checkpoint_name(last))
            names = {without_rank(each) for each in names}
            held |= {each: "a checkpoint" for each in names if not each.startswith("model.")}
            (folder / f"{name}.json").write_text(json.dumps(held))


def values_of(run: Run) -> dict[str, Any]:
    """Return what a run has of each row, as far as one can compare it on other ranks."""
    trainer, replicas = run.trainer, run.ranks.replicas
    model, scaler, history = trainer.sharding.model, trainer.scaler, run.metrics.history
    values = {
        "trained weights": list(map(whole, model.parameters())),
        BUFFERS: list(map(whole, model.buffers())),
        "state of the optimizer": [
            whole(each) if isinstance(each, torch.Tensor) else each
            for state in trainer.optimizer.state.values()
            for _, each in sorted(state.items())
        ],
        "counters": trainer.counters.state() | {"saved_iteration": 0},
        "schedules": trainer.schedules.state(),
        "order of samples": [*run.batches.earlier_sizes],
        "loss scale of fp16": scaler.state_dict(),
        "first and last losses, for the summary": history.state_dict(),
    }
    if not isinstance(replicas, LocalSGD):
        return values
    steps = replicas.steps
    agreed = [each for part in steps.fragments for each in part.agreed]
    errors = [(each.mean.error, *each.mean.unsent) for each in steps.fragments]
    return values | {
        "global weights, buffers": copied([*agreed, *steps.buffers.agreed.values()]),
        "outer momentum": copied([each.momentum for each in steps.fragments]),
        "what rounding lost": copied([part for each in errors for part in each]),
        "exchanges under way": [each.merges_at for each in steps.parts],
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with all ranks' parts."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.clone() for each in tensors]


def equal(one: Any, other: Any) -> bool:
    """Whether two values, or lists of them, are equal to the bit."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def means(values: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the means of tensors over nodes, in fp64."""
    columns = zip(*values, strict=True)
    return [(sum(each.double() for each in row) / len(row)).to(row[0].dtype) for row in columns]


def require(
    operation: str,
    after: dict[str, Any],
    *,
    own: dict[str, Any],
    of_nodes: list[dict[str, Any]],
    fresh: dict[str, Any] | None = None,
) -> None:
    """Require of each value what the table says of an operation.

    own: the values before it. of_nodes: those of all nodes before it; for a node that joins, those
    of the others. fresh: of a run that begins.
    """
    for name, value in after.items():
        what, before = ROWS[name][operation], [each.get(name) for each in of_nodes]
        if what == "mean":
            expected = means(before)
            assert not equal(expected, before[0]), f"{operation} of {name}: nothing to average"
            for each, mean in zip(value, expected, strict=True):
                torch.testing.assert_close(each, mean, rtol=1e-6, atol=1e-12)
        elif what == "own":
            assert equal(value, own[name]), f"{operation} of {name}"
        elif what in ("of the others", "kept"):
            assert equal(value, before[0]), f"{operation} of {name}"
        elif what == "anew" and fresh is not None:
            assert equal(value, fresh[name]), f"{operation} of {name}"
        else:
            assert what in ("anew", "own part", "outer optimizer"), what


def take_steps(run: Run, count: int) -> dict[str, Any]:
    """Take steps; return the values after them. Losses are those of the summary."""
    with run.batches.loader(TRAIN, 0) as batches:
        for _ in range(count):
            run.metrics.iteration(run.trainer.step(batches).result())
    run.metrics.flush()
    return values_of(run)


@ranks(2, timeout=120)
def steps_and_exchange(folder: Path) -> None:
    """Two nodes take two steps, save, and exchange; requires what the table says of the last."""
    every = {"sync_every": 3, "sync_bits": 2}
    flags = FLAGS + with_json({}, ranks_per_node=1, **every)
    flags += f"--train-iters 9 --save {folder / 'alone'}"
    with worlds(1, folder) as outer, built_run(flags, outer) as run:
        values = take_steps(run, 2)
        of_nodes = outer.gather(values)
        run.save()
        run.ranks.replicas.steps.synchronize(2)
        after = values_of(run)
        require("outer step", after, own=values, of_nodes=of_nodes)
        alike = ("trained weights", "global weights, buffers", BUFFERS)
        assert all(equal(*outer.gather(after[name])) for name in alike)
        if outer.node == 0:
            (folder / "alone.pickle").write_bytes(pickle.dumps(of_nodes))


@ranks(1, timeout=120)
def go_on_with_means(folder: Path) -> None:
    of_nodes = pickle.loads((folder / "alone.pickle").read_bytes())
    require_loaded("average", f"{folder / 'alone'}", of_nodes)


@ranks(2, timeout=120)
def save_on_two_ranks(folder: Path) -> None:
    flags = FLAGS + with_json({"stage": 2}) + "--expert-model-parallel-size 2 "
    with built_run(f"{flags} --train-iters 9 --save {folder / 'two'}") as run:
        values = take_steps(run, 2)
        run.save()
        if dist.get_rank() == 0:
            (folder / "two.pickle").write_bytes(pickle.dumps([values]))


@ranks(1, timeout=120)
def go_on_alone(folder: Path) -> None:
    of_nodes = pickle.loads((folder / "two.pickle").read_bytes())
    require_loaded("resume", f"{folder / 'two'}", of_nodes)


def require_loaded(operation: str, load: str, of_nodes: list[dict[str, Any]]) -> None:
    """Require what the table says of a run on one rank that goes on from a checkpoint."""
    flags = FLAGS + "--train-iters 9 "
    with built_run(flags) as run:
        fresh = values_of(run)
    with built_run(f"{flags} --load {load}") as run:
        require(operation, values_of(run), own=fresh, of_nodes=of_nodes, fresh=fresh)


@ranks(2, timeout=120)
def join(folder: Path) -> None:
    """A node joins one that has loaded a shorter run of other rates; both train to the end."""
    own = folder / "joined"
    elastic = {"sync_store": "localhost:1", "sync_nodes": 1, "sync_every": 2, "sync_bits": 2}
    flags = FLAGS + with_json({}, ranks_per_node=1, **elastic)
    flags += f"--lr 1e-4 --train-iters 12 --lr-decay-iters 9 --load {folder / 'two'}"
    with elastic_nodes(folder, 2, 1) as outer, built_run(flags, outer) as run:
        fresh, joins, trainer = values_of(run), outer.joins, run.trainer
        assert trainer.schedules.learning_rate.max_lr == (1e-4 if joins else 1e-2)
        wait_for_joiners(outer, 1)
        run.ranks.replicas.join(run)
        if not joins:
            take_steps(run, 1)
            trainer.ranks.replicas.steps.synchronize(3)
        after = values_of(run)
        own.with_suffix(f".{outer.number}").write_bytes(pickle.dumps(after))
        assert trainer.ranks.replicas.steps.sum(lambda place, size: [1.0]) == [2.0]
        of_first = pickle.loads(own.with_suffix(".0").read_bytes())
        if joins:
            require("join", after, own=fresh, of_nodes=[of_first], fresh=fresh)
        assert trainer.schedules.learning_rate.max_lr == 1e-2
        assert [sizes[0] for sizes in run.batches.earlier_sizes] == [4 * 9]
        train(run)
        end = values_of(run)
        own.with_suffix(f".end.{outer.number}").write_bytes(pickle.dumps(end))
        assert trainer.ranks.replicas.steps.sum(lambda place, size: [1.0]) == [2.0]
        of_first = pickle.loads(own.with_suffix(".end.0").read_bytes())
        names = ("trained weights", BUFFERS, "global weights, buffers", "counters", "schedules")
        names += ("order of samples",)
        assert all(equal(end[name], of_first[name]) for name in names)


def require_exported(folder: Path) -> None:
    """Require the means of what the table says in an exported file, and nothing else."""
    path = folder / "model.safetensors"
    consolidate.main(["--load", str(folder / "alone"), "--output", str(path)])
    exported = safetensors.torch.load_file(path)
    of_nodes, expected = pickle.loads((folder / "alone.pickle").read_bytes()), []
    for name, row in ROWS.items():
        if row["export"] == "mean" and name in of_nodes[0]:
            expected += means([each[name] for each in of_nodes])
    assert len(exported) == len(expected)
    assert {bytes_of(each) for each in exported.values()} == {*map(bytes_of, expected)}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_operations_do_what_the_table_says(tmp_path: Path) -> None:
    steps_and_exchange(folder=tmp_path)
    require_exported(tmp_path)
    go_on_with_means(folder=tmp_path)
    save_on_two_ranks(folder=tmp_path)
    go_on_alone(folder=tmp_path)
    join(folder=tmp_path)


def test_the_document_shows_the_table() -> None:
    lines = [f"| state | {' | '.join(OPERATIONS)} |", f"|---|{'---|' * len(OPERATIONS)}"]
    lines += [f"| {' | '.join([name, *row.values()])} |" for name, row in ROWS.items()]
    assert "\n".join(lines) in (ROOT / "docs/architecture.md").read_text()
