"""Dumped samples equal those of megatron-core; the printed text; bad input."""

from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.commands.dump_samples import main
from tests.full_disk import full_disk
from tests.indexed import write
from tests.megatron_zpp.data.test_gpt_dataset import CASES, FILES, sha

SPLITS = ("train", "valid", "test")
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50257"]
ROWS = 8  # samples whose masks the file of expected results holds
# One dataset, and blends; test_gpt_dataset.py compares all cases.
NAMES = [
    name
    for name in CASES
    if name.endswith(("37", "three")) or CASES[name].get("reset_position_ids")
]


def flags_of(case: dict) -> list[str]:
    argv = ["--seq-length", str(case["seq_length"]), "--seed", str(case["seed"])]
    for key in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        paths = [str(FILES / word) if "_doc" in word else word for word in case.get(key) or ()]
        argv += [f"--{key.replace('_', '-')}", *paths] if paths else []
    argv += ["--split", case["split"]] if "split" in case else []
    for split, size in zip(SPLITS, case["sizes"], strict=True):
        argv += [] if size is None else [f"--{split}-samples", str(size)]
    masks = ("eod_mask_loss", "reset_position_ids")
    return argv + [f"--{name.replace('_', '-')}" for name in masks if case.get(name)]


@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_those_of_megatron_core(name: str, tmp_path: Path) -> None:
    case, output = CASES[name], tmp_path / "folder" / "samples.npz"
    argv = [*flags_of(case), *NULL, "--data-cache-path", str(tmp_path), "--output", str(output)]
    assert main(argv) == 0
    arrays = np.load(output)
    for split, expected in case["results"].items():
        if expected is None:
            assert f"{split}/tokens" not in arrays
            continue
        length, width = expected["length"], case["seq_length"]
        tokens, masks = arrays[f"{split}/tokens"], arrays[f"{split}/loss_mask"]
        positions, index = arrays[f"{split}/position_ids"], arrays[f"{split}/dataset_index"]
        assert tokens.dtype == np.int32 and tokens.shape == (length, width + 1)
        assert sha(tokens, "<i4") == expected["samples"]
        assert (masks.dtype, positions.dtype, index.dtype) == (np.float32, np.int64, np.int16)
        assert masks.shape == positions.shape == (length, width) and index.shape == (length,)
        if "loss_mask" in expected:
            assert sha(masks[:ROWS], "<f4") == expected["loss_mask"]
            assert sha(positions[:ROWS], "<i8") == expected["position_ids"]
        if "dataset_index" in expected:
            assert sha(index, "<i2") == expected["dataset_index"]


def small(folder: Path, *more: str) -> list[str]:
    text = write(folder / "text", [[[1, 2, 3, 99]], [], [[4, 5], [6, 99]]])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    return ["--data-path", text, "--split", "1", "--seq-length", "4", *null, *more]


def test_text_shows_the_borders_of_documents(tmp_path: Path, capsys) -> None:
    assert main(small(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "=== train sample 0 of 1"
    pieces = {"1 2 3 99": "document 0, tokens 0 to 3 of 4"}
    pieces |= {"4 5": "document 2, sequence 0, tokens 0 to 1 of 2"}
    pieces |= {"6 99": "document 2, sequence 1, tokens 0 to 1 of 2"}
    shown = dict(zip(lines[2::2], lines[1::2], strict=True))  # text by title
    whole = [text for text in shown if text in pieces]
    assert len(whole) >= len(shown) - 1 and sum(len(text.split()) for text in shown) == 5
    assert all(shown[text] == f"--- {tmp_path}/text, {pieces[text]}" for text in whole)


def test_data_flags_of_a_run_without_effect_are_logged(tmp_path: Path, capsys, caplog) -> None:
    argv = "--train-samples 0 --data-impl mmap --num_workers 3 --reset-attention-mask".split()
    assert main(small(tmp_path, *argv, "--output", str(tmp_path / "samples.npz"))) == 0
    assert "train 1" in capsys.readouterr().out  # as in megatron-core an epoch: it is never less
    (line,) = [each for each in caplog.messages if each.startswith("no effect here: ")]
    for flag in ("--data-impl mmap", "--num_workers 3", "--reset-attention-mask"):
        assert flag in line


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog) -> None:
    output, place = tmp_path / "samples.npz", tmp_path / "file" / "cache"
    (tmp_path / "file").touch()
    argv = small(tmp_path, "--split", "1,1", "--seq-length", "1", "--output", str(output))
    other = write(tmp_path / "other", [[[1, 2, 3]], [[4, 5, 6]]])
    assert main([*argv, "--data-path", argv[1], other, "--data-cache-path", str(place)]) == 0
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith(f"cannot keep the sample index in {place}")
    assert warning.endswith("(Not a directory); it is built in memory each time")
    arrays = np.load(output)
    assert arrays["train/tokens"].shape == (7, 2) and arrays["valid/tokens"].shape == (3, 2)


def test_a_split_too_short_for_a_sample_is_an_empty_array(tmp_path: Path) -> None:
    output = tmp_path / "samples.npz"
    argv = small(tmp_path, "--split", "2,1", "--output", str(output))
    assert main(argv) == 0
    arrays = np.load(output)
    assert arrays["valid/tokens"].shape == (0, 5) and arrays["train/tokens"].shape == (1, 5)
    assert "test/tokens" not in arrays


def test_a_full_disk_is_named_and_no_half_file_stays(tmp_path: Path, capsys) -> None:
    argv = small(tmp_path, "--output", str(tmp_path / "samples.npz"))
    with full_disk(250):
        assert main(argv) == 1
    assert f"error: cannot write {tmp_path}/samples.npz (File too large)" in capsys.readouterr().err
    assert not list(tmp_path.glob("*samples*")) and not list(tmp_path.glob(".*"))
