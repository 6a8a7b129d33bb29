"""What TensorBoard reads back, names and axes, and curves that stay clean over a resume."""

import json
import math
import sys
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.monitor.communication import Communication
from megatron_zpp.monitor.matmul_rate import MatmulRate
from megatron_zpp.monitor.memory import MemoryUse
from megatron_zpp.monitor.metrics import Iteration, Validation, Writer, summarize
from megatron_zpp.monitor.tensorboard import Axis, Position
from megatron_zpp.monitor.writers import open_writers
from megatron_zpp.settings.config import LogConfig
from zeropp.errors import InputError
from zeropp.wire.traffic import HOPS, PURPOSES

BATCH, LENGTH = 4, 8
BARE = LogConfig(log_interval=1)
ALL_AXES = replace(BARE, log_all_axes_to_tensorboard=True)
EVERYTHING = replace(
    ALL_AXES,
    log_batch_size_to_tensorboard=True,
    log_memory_to_tensorboard=True,
    log_throughput=True,
    log_timers_to_tensorboard=True,
    log_validation_ppl_to_tensorboard=True,
    log_world_size_to_tensorboard=True,
)
MEMORY = MemoryUse(
    allocated_bytes=10, reserved_bytes=20, peak_allocated_bytes=10, peak_reserved_bytes=20,
    allocated_count=3,
)  # fmt: skip
THREE_AXES = ("", " vs samples", " vs tokens")
FLOPS = TokenFlops(model=1e12, performed=2e12)
RATE = MatmulRate(measured=5e13, peak=8e13)
SENT = Communication(steps=2, sent=Counter({("gradients", "in_node"): 14}))
NAMES = [f"{purpose}_{hop}" for purpose in PURPOSES for hop in HOPS]
COMMUNICATION = {
    f"comm/{name}": 0.0 for name in (*NAMES, "across_nodes", "expected_across_nodes")
} | {"comm/gradients_in_node": 7.0, "comm/in_node": 7.0}
EXTRA = {
    "batch_generator_seconds": 0.125,
    "communication": SENT,
    "optimizer_norms": {("variance", "l2"): 5.0},
}


@pytest.fixture(autouse=True)
def sortable_file_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files are read in the order of their names: second, host, process, number of the file.

    A resumed run is another process in another second; here only the number differs, and 10 sorts
    before 9.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


def iteration(number: int, **changed: object) -> Iteration:
    numbers = {
        "iteration": number,
        "train_iters": 100,
        "consumed_samples": number * BATCH,
        "consumed_tokens": number * BATCH * LENGTH,
        "seconds": 0.25,
        "learning_rate": 0.5,
        "global_batch_size": BATCH,
        "seq_length": LENGTH,
        "loss": 8.0 / number,
    }
    return Iteration(**numbers | changed)


def write(writers: list[Writer], numbers: range, **changed: object) -> None:
    for number in numbers:
        step = iteration(number, **changed)
        for writer in writers:
            writer.iteration(step)
            writer.interval(summarize([step], world_size=2, flops=FLOPS, rate=RATE))


def validate(writers: list[Writer], number: int, loss: float, split: str = "validation") -> None:
    measured = Validation(
        iteration=number,
        consumed_samples=number * BATCH,
        consumed_tokens=number * BATCH * LENGTH,
        loss=loss,
        moment=f"iteration {number}",
        split=split,
    )
    for writer in writers:
        writer.validation(measured)


def opened(folder: Path, config: LogConfig = BARE, at: Position | None = None) -> list[Writer]:
    config = replace(config, tensorboard_dir=str(folder))
    return open_writers(config, rank=0, world_size=2, resumed_at=at)


def close(writers: list[Writer]) -> None:
    for writer in writers:
        writer.close()


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder: (step, value) of each scalar, over all axes."""
    points = {}
    for axis in (each for each in Axis if (folder / each.folder).exists()):
        board = EventAccumulator(str(folder / axis.folder), size_guidance={"scalars": 0}).Reload()
        for name in board.Tags()["scalars"]:
            assert name not in points, f"{name} is drawn over two axes"
            points[name] = [(point.step, point.value) for point in board.Scalars(name)]
    return points


def test_every_name_of_megatron_deepspeed_over_three_axes(tmp_path):
    writers = opened(tmp_path, EVERYTHING)
    measured = {"loss_scale": 16.0, "grad_norm": 1.5, "num_zeros": 2.0, "params_norm": 3.0}
    write(writers, range(3, 4), memory=MEMORY, forward_backward_seconds=0.25, **EXTRA, **measured)
    validate(writers, 3, 2.0)
    validate(writers, 3, 1.0, split="test")
    close(writers)
    expected = {
        "learning-rate/learning-rate": 0.5,
        "batch-size/batch-size": 4.0,
        "lm-loss-training/lm loss": 8.0 / 3,
        "loss-scale/loss-scale": 16.0,
        "grad-norm/grad-norm": 1.5,
        "num-zeros/num-zeros": 2.0,
        "params-norm/params-norm": 3.0,
        "world-size/world-size": 2.0,
        "seqlen/actual_seq_length": 8.0,
        "iteration-time/iteration-time": 0.25,
        "lm-loss-validation/lm loss validation": 2.0,
        "lm-loss-validation/lm loss validation ppl": math.exp(2),
        "lm-loss-validation/lm loss test": 1.0,
        "lm-loss-validation/lm loss test ppl": math.e,
    }
    steps = dict(zip(THREE_AXES, (3, 12, 96), strict=True))
    points = {
        name + axis: (steps[axis], value) for name, value in expected.items() for axis in steps
    }
    points |= {
        "mem-reserved-bytes": (3, 20.0),
        "mem-allocated-bytes": (3, 10.0),
        "mem-allocated-count": (3, 3.0),
        "throughput": (3, 4 * 8 / 0.25 / 2),
        "share-of-measured-matmul-rate": (3, 4 * 8 / 0.25 / 2 / 50),
        "mfu": (3, 4 * 8 / 0.25 / 2 / 80),
        "forward-backward-time": (3, 0.25),
        "batch-generator-time": (3, 0.125),
        "optimizer/variance_l2": (3, 5.0),
        "optimizer/variance_l2 vs tokens": (96, 5.0),
        "0-overview/1 training loss": (3, 8.0 / 3),
        "0-overview/2 held-out loss": (3, 2.0),
        "0-overview/3 tokens per second": (3, BATCH * LENGTH / 0.25),
        "0-overview/4 seconds per step": (3, 0.25),
        **{name: (3, num_bytes) for name, num_bytes in COMMUNICATION.items()},
        "steps-vs-samples/y=steps,x=samples": (12, 3.0),
        "steps-vs-samples/y=samples,x=steps": (3, 12.0),
        "steps-vs-tokens/y=steps,x=tokens": (96, 3.0),
        "steps-vs-tokens/y=tokens,x=steps": (3, 96.0),
    }
    read = curves(tmp_path)
    assert set(read) == set(points)
    for name, (step, value) in points.items():
        assert read[name] == [(step, pytest.approx(value, rel=1e-6))], name  # stored as fp32


def test_flags_left_out_write_nothing_of_theirs(tmp_path):
    writers = opened(tmp_path)
    write(writers, range(1, 2), memory=MEMORY, communication=SENT)
    validate(writers, 1, 2.0)
    close(writers)
    names = sorted(curves(tmp_path))
    assert [name[:11] for name in names[:5]] == ["0-overview/"] * 4 + ["comm/across"]
    assert {name for name in names[4:] if not name.startswith("comm/")} == {
        "learning-rate/learning-rate", "lm-loss-training/lm loss", "seqlen/actual_seq_length",
        "lm-loss-validation/lm loss validation",
    }  # fmt: skip
    assert not list(tmp_path.glob("vs_*"))


@pytest.mark.parametrize("damage", [lambda all: all[:-3], lambda all: all[:-60] + b"\xff" * 60])
def test_a_record_that_a_kill_damaged_does_not_hide_the_resumed_run(tmp_path, damage):
    """Each step is shown once on each axis, from the checkpoint on with the values of the second.

    The first had gone on behind its last checkpoint, that of step 2.
    """
    first = opened(tmp_path, ALL_AXES)
    write(first, range(1, 5))
    validate(first, 3, 7.0)
    close(first)
    for events in (each for axis in Axis for each in (tmp_path / axis.folder).glob("events*")):
        events.write_bytes(damage(events.read_bytes()))
    (tmp_path / "metrics.jsonl").open("a").write('{"iterati')
    again = opened(tmp_path, ALL_AXES, at=iteration(2))
    write(again, range(3, 6), loss=0.5)
    validate(again, 4, 1.0)
    close(again)
    read = curves(tmp_path)
    for axis, width in zip(THREE_AXES, (1, BATCH, BATCH * LENGTH), strict=True):
        points = read["lm-loss-training/lm loss" + axis]
        assert points == [(width * n, 8.0 / n if n < 3 else 0.5) for n in range(1, 6)]
        assert read["lm-loss-validation/lm loss validation" + axis] == [(4 * width, 1.0)]
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    steps = [line["iteration"] for line in lines if "lm_loss" in line]
    assert steps == [1, 2, 3, 4, 5]


def test_a_new_run_keeps_the_curves_of_the_earlier_one_beside_its_own(tmp_path):
    for loss in (2.0, 1.0):
        writers = opened(tmp_path, ALL_AXES)
        write(writers, range(1, 3), loss=loss)
        close(writers)
    (earlier,) = tmp_path.glob("earlier-*")
    name = "lm-loss-training/lm loss"
    assert curves(earlier)[name] == [(1, 2.0), (2, 2.0)]
    for axis in Axis:
        assert len(list((tmp_path / axis.folder).glob("events*"))) == 1
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["lm_loss"] for line in lines] == [1.0, 1.0]
    assert curves(tmp_path)[name] == [(1, 1.0), (2, 1.0)]


def test_files_of_other_programs_are_left_alone(tmp_path):
    foreign = tmp_path / "events.out.tfevents.1.host.1.0"
    foreign.write_bytes(b"not ours")
    close(opened(tmp_path))
    close(opened(tmp_path, at=iteration(1)))
    assert foreign.read_bytes() == b"not ours"


def test_json_lines_have_the_numbers_of_the_log_line(tmp_path):
    """Also before the run ends, after a flush."""
    writers = opened(tmp_path)
    write(writers, range(1, 2), grad_norm=1.5, loss=math.nan)
    for writer in writers:
        writer.flush()
    assert len(curves(tmp_path)["lm-loss-training/lm loss"]) == 1
    validate(writers, 1, 2.0)
    write(writers, range(2, 3), empty_share=0.25)
    close(writers)
    trained, held_out, partly_empty = map(
        json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert "empty_micro_batches" not in trained and partly_empty["empty_micro_batches"] == 0.25
    shares = curves(tmp_path)["lm-loss-training/share of empty micro-batches"]
    assert shares == [(2, 0.25)]
    assert math.isnan(trained["lm_loss"])
    assert (trained["grad_norm"], trained["nan"], trained["loss_scale"]) == (1.5, 1, None)
    assert held_out == {"iteration": 1, "validation_loss": 2.0}


def test_the_configuration_lies_beside_the_curves(tmp_path):
    config = replace(BARE, tensorboard_dir=str(tmp_path))
    close(open_writers(config, rank=0, world_size=1, settings={"num_layers": 7}))
    board = EventAccumulator(str(tmp_path)).Reload()
    (event,) = board.Tensors("arguments/text_summary")
    assert b"| num_layers | 7 |" in event.tensor_proto.string_val[0]


def test_who_writes_nothing_and_what_cannot_be_written(tmp_path, monkeypatch):
    config = replace(BARE, tensorboard_dir=str(tmp_path / "board"), wandb_project="p")
    assert open_writers(config, rank=1, world_size=2) == []
    assert open_writers(BARE, rank=0, world_size=2) == []
    assert not (tmp_path / "board").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--tensorboard-dir .*file"):
        opened(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        open_writers(replace(BARE, wandb_project="p"), rank=0, world_size=1)


def test_wandb_gets_the_same_names(monkeypatch):
    logged, runs = [], []

    def init(**arguments: object) -> object:
        runs.append(arguments)
        log = lambda values, step: logged.append((step, values))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda: logged.append("finished"))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = replace(
        BARE, wandb_project="project", wandb_entity="team", log_timers_to_tensorboard=True
    )
    writers = open_writers(config, rank=0, world_size=2, settings={"seed": 1})
    write(writers, range(2, 3), **EXTRA)
    validate(writers, 2, 3.0)
    close(writers)
    (run,) = runs
    assert run.pop("config") == {"seed": 1}
    assert run == {"project": "project", "name": None, "entity": "team", "dir": None}
    assert logged == [
        (2, {
            "learning-rate/learning-rate": 0.5,
            "lm-loss-training/lm loss": 4.0,
            "seqlen/actual_seq_length": 8,
            "batch-generator-time": 0.125,
            "optimizer/variance_l2": 5.0,
            "consumed-samples": 8,
            "consumed-tokens": 64,
        }),
        (2, {
            "0-overview/1 training loss": 4.0,
            "0-overview/3 tokens per second": 128.0,
            "0-overview/4 seconds per step": 0.25,
            "iteration-time/iteration-time": 0.25,
        } | COMMUNICATION),
        (2, {"0-overview/2 held-out loss": 3.0, "lm-loss-validation/lm loss validation": 3.0}),
        "finished",
    ]  # fmt: skip
