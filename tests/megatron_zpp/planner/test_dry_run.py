"""`--dry-run` on the command line: what it prints, what it ends with, and that it takes nothing."""

import pytest

from megatron_zpp.commands.pretrain import main
from megatron_zpp.planner import dry_run

GIB = 2**30
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 9 --mock-data --tokenizer-type NullTokenizer --vocab-size 500 "
)


def test_what_fits_ends_with_0(capsys):
    assert main(f"{SMALL}--dry-run --dry-run-ranks 4 --zero-stage 2 --bf16".split()) == 0
    message = capsys.readouterr().out
    for words in ("4 ranks", "optimizer state", "activations", "gradients in flight", "fits"):
        assert words in message
    assert "error" not in message


def test_muon_has_a_row_and_its_bytes(capsys):
    flags = f"{SMALL}--dry-run --dry-run-ranks 4 --zero-stage 3 --optimizer muon"
    assert main(flags.split()) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "optimizer  " in line]
    assert "operations of the busiest rank in a step" in rows[0] and len(rows) > 1


def test_what_does_not_fit_ends_with_1_and_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "free_bytes", lambda: GIB)
    huge = SMALL.replace("hidden-size 64", "hidden-size 12288").replace("layers 2", "layers 96")
    assert main(f"{huge}--dry-run --dry-run-ranks 8 --zero-stage 1".split()) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "does not fit" in last and "for 8 ranks, of 1.00 GiB" in last and "--zero-stage" in last


def test_on_a_gpu_each_memory_is_judged_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "find_gpu", lambda _: ("Some GPU", 4 * GIB))
    monkeypatch.setattr(dry_run, "free_bytes", lambda: 4 * GIB)
    wide = SMALL.replace("hidden-size 64", "hidden-size 4096")  # 0.4 billion parameters
    flags = f"{wide}--dry-run --bf16 --zero-stage 2 "
    assert main(flags.split()) == 1
    message = capsys.readouterr().out
    assert "error: does not fit, Some GPU" in message and "--cpu-optimizer" in message
    assert main(f"{flags}--cpu-optimizer".split()) == 1
    message = capsys.readouterr().out
    assert "error: does not fit, host" in message and "fit, Some GPU" not in message
    ratio = message.partition("ratio = ")[2].partition(" fits, and the device then needs")[0]
    main(f"{flags}--cpu-optimizer --optimizer-offload-fraction {ratio}".split())
    assert "fit, host" not in capsys.readouterr().out


def test_a_host_of_unknown_size_fits(capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "free_bytes", lambda: None)
    assert main(f"{SMALL}--dry-run".split()) == 0
    assert "of an unknown size" in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (3, 0)])
def test_launched_it_takes_the_launched_ranks_and_says_it_once(capsys, monkeypatch, rank, lines):
    for name, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(f"{SMALL}--dry-run --zero-stage 3".split()) == 0
    assert capsys.readouterr().out.count("2 of 2 ranks") == lines
