"""What ends a process at a signal."""

import os
import pickle
import signal
from contextlib import suppress
from dataclasses import replace
from unittest.mock import MagicMock

import pytest

from megatron_zpp.commands.pretrain import main
from megatron_zpp.settings.config import CheckpointConfig, TrainingConfig
from megatron_zpp.train import pretrain
from megatron_zpp.train.pretrain import last_checkpoint
from megatron_zpp.train.stop import Interrupted, Stopping
from tests.launched import LAUNCH, launching, rank_pid, wait_for
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment

TRAINING = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --zero-stage 3 --eval-iters 0 "
    "--lr 1e-3 --train-iters 1 --save "
)
# Rank 0 takes long to write its part of a checkpoint, while rank 1 waits for it.
SLOW_SAVE = """
import os, sys, time
from megatron_zpp.commands.pretrain import main
from torch.distributed.checkpoint import FileSystemWriter
from zeropp.ranks.exit import exit_process

write_data = FileSystemWriter.write_data

def slow(*arguments, **options):
    print("rank", os.environ["RANK"], "saves", flush=True)
    for _ in range(600 if os.environ["RANK"] == "0" else 0):
        time.sleep(0.1)
    return write_data(*arguments, **options)

FileSystemWriter.write_data = slow
exit_process(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_the_signal_that_a_flag_names_is_recorded_beside_sigterm(name):
    before = signal.getsignal(signal.SIGUSR1)
    config = TrainingConfig(exit_signal_handler=True, exit_signal="SIGUSR1")
    ranks = MagicMock(sum_over_replicas=lambda *values: values)
    with Stopping(config) as stopping:
        assert stopping.reason(1, ranks) is None
        os.kill(os.getpid(), signal.Signals[name])
        assert stopping.reason(1, ranks) == "a signal (--exit-signal-handler)"
    assert signal.getsignal(signal.SIGUSR1) == before


def test_an_interruption_can_be_sent_to_other_ranks():
    """As torch's distributed checkpoint does with what is raised while it plans a save."""
    received = pickle.loads(pickle.dumps(Interrupted(signal.SIGTERM)))
    assert received.code == 143 and str(received) == "stopped by SIGTERM"


def test_what_fails_after_an_interruption_was_caught_is_not_the_cause(monkeypatch, capsys):
    """Torch's checkpoint code catches it, and fails because the other ranks are gone."""

    def save(*_: object) -> None:
        with suppress(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(pretrain.RankProgram, "pretrain", save)
    assert main(TRAINING.removesuffix("--save ").split()) == 130
    *_, error, advice = capsys.readouterr().out.splitlines()
    assert error == "error: stopped by SIGINT"
    assert advice == "nothing was saved: --save FOLDER saves checkpoints"


def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on(tmp_path):
    options = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    assert f"no checkpoint in {tmp_path} yet: --save-interval N" in last_checkpoint(options)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("50")
    words = f"the last checkpoint in {tmp_path} is of iteration 50; "
    assert last_checkpoint(options) == words + "run the same command again to continue"
    elsewhere = replace(options, load=None)
    assert last_checkpoint(elsewhere) == words + f"continue with --load {tmp_path}"


@pytest.mark.parametrize(
    ("machines", "local_rank", "is_first", "lines"),
    [(1, 0, True, 1), (1, 0, False, 0), (2, 0, False, 1), (2, 1, False, 0)],
)
def test_what_all_ranks_refuse_is_said_on_each_machine(
    machines, local_rank, is_first, lines, monkeypatch
):
    def refuse(*_: object) -> None:
        raise InputError("no such folder")

    monkeypatch.setattr(pretrain.RankProgram, "pretrain", refuse)
    environment = Environment(world_size=4, machines=machines, local_rank=local_rank)
    said, heartbeat, stopping = [], MagicMock(), MagicMock(interruption=None)
    heartbeat.publish_own_failure.return_value = is_first
    console = MagicMock(notice=lambda level, text: said.append(text))
    ranks = MagicMock(environment=environment)
    program = pretrain.RankProgram(
        config=MagicMock(), ranks=ranks, console=console, stopping=stopping, open_model=None
    )
    program.heartbeat = heartbeat
    ranks.num_ranks = 1  # so that `run` makes no heartbeat of its own
    assert program.run() == 1
    assert said == ["no such folder"] * lines


def test_a_file_stops_a_run_which_saves(tmp_path, capsys):
    flags = TRAINING.replace("--train-iters 1", "--train-iters 3") + str(tmp_path / "save")
    words = [*flags.split(), "--kill-switch-path", str(tmp_path / "stop")]
    (tmp_path / "stop").touch()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "stopping after iteration 1: --kill-switch-path" in printed
    assert (tmp_path / "save/iter_0000001").is_dir()
    (tmp_path / "stop").unlink()
    assert main([*words, "--load", str(tmp_path / "save")]) == 0
    assert "stopping" not in capsys.readouterr().out
    assert (tmp_path / "save/iter_0000003").is_dir()


def test_ranks_without_a_signal_say_which_rank_had_one(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_SAVE)
    flags = (
        f"{TRAINING}{tmp_path}/save --tensorboard-dir {tmp_path}/curves --log-interval 1".split()
    )
    with launching(tmp_path) as launch:
        process, log = launch([*LAUNCH, "--num_ranks", "2", str(tmp_path / "slow.py"), *flags])
        wait_for("rank 0 saves", log, process)
        os.kill(rank_pid(0, process), signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
    errors = [line for line in log.read_text().splitlines() if "error: " in line]
    assert sorted(line.partition(";")[0] for line in errors) == [
        "[rank 1] error: rank 0: stopped by SIGINT",
        "error: stopped by SIGINT",
    ]
    assert "Traceback" not in log.read_text()
    assert f"report so far: {tmp_path}/curves/report.html" in log.read_text()
    assert "finished, 1 iteration<" in (tmp_path / "curves" / "report.html").read_text()
