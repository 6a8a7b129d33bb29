"""Ranks that were started differently are told in what, before they train or wait."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_zpp.settings.arguments import parse
from tests.launched import ROOT
from tests.megatron_zpp.train.training_runs import TINY
from tests.zeropp.ranks.test_rendezvous import free_port


def differing(flags: str, others: str) -> set[str]:
    own, other = (parse((TINY + text).split(), 2).shared() for text in (flags, others))
    assert own.keys() == other.keys()
    return {name for name in own if own[name] != other[name]}


def test_settings_are_compared_and_paths_only_for_being_given(tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}')
    assert differing("--data-path a", "--data-path b --num-workers 3 --logging-level 30") == set()
    assert differing("--save a", "") == {"--save"}
    assert differing("--seed 1", "--seed 2") == {"--seed"}
    assert differing("--zero-stage 3", f"--deepspeed-config {config}") == {
        '"zero_optimization.zero_quantized_weights"'
    }


def printed_by(*flags_of_ranks: str, statuses: tuple[int, int]) -> list[str]:
    """What two processes print, each of which stands for a machine that nobody launched."""
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *TINY.split(), "--mock-data",
             "--train-iters", "2", *flags.split()],
            env={**os.environ, **shared, **place, "RANK": str(rank)},
            stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
        )
        for rank, flags in enumerate(flags_of_ranks)
    ]  # fmt: skip
    printed = [process.communicate(timeout=100)[0] for process in processes]
    assert tuple(process.returncode for process in processes) == statuses, printed
    assert "Traceback" not in "".join(printed)
    return printed


def test_two_machines_with_different_flags_end_with_what_differs():
    """Their learning rates would train some third model."""
    size = "--tensor-model-parallel-size"
    for printed in printed_by(f"--lr 0.01 {size} 1", f"--lr 0.001 {size} 2", statuses=(2, 2)):
        assert "--lr is 0.01 on rank 0 and 0.001 on rank 1" in printed
        assert f"{size} is 1 on rank 0 and 2 on rank 1" in printed


def test_a_mistake_on_one_machine_is_said_on_the_other():
    """Which waited for its time limit, 10 minutes, and said only that rank 1 had not come."""
    for printed in printed_by("", "--hiden-size 64", statuses=(1, 2)):
        assert "unknown flag --hiden-size" in printed
