"""Whatever a person gets wrong ends with a non-zero status and the culprit in the last lines."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.commands.pretrain import main
from megatron_zpp.data.indexed_dataset import write_dataset
from tests.full_disk import full_disk
from zeropp.checkpoint.folder_lock import FolderLock

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --train-iters 2 "
    "--micro-batch-size 1 --eval-iters 0 --num-workers 0 --log-interval 1 --lr 1e-3 "
)
MOCK = TINY + "--mock-data --tokenizer-type NullTokenizer --vocab-size 20 "
DATA = TINY + "--tokenizer-type NullTokenizer --vocab-size 20 --data-path "

# As the ZeRO-Offload tutorial prints it: a comma too many, and one too few.
OFFLOAD_AS_PRINTED = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""


@pytest.fixture
def fails(capsys):
    """Run the job with flags that must fail; return its last lines."""

    def run(flags: str | list[str]) -> str:
        assert main(flags.split() if isinstance(flags, str) else flags) != 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        lines = captured.out.splitlines()
        error_line = max(i for i, line in enumerate(lines) if line.startswith("error:"))
        return "\n".join(lines[error_line:])

    return run


@pytest.fixture
def prefix(tmp_path) -> Path:
    """A dataset of 40 documents of 12 tokens below 20."""
    path = tmp_path / "text_document"
    write_dataset(path, 20, ([np.arange(12) % (document % 7 + 2)] for document in range(40)))
    return path


@pytest.mark.parametrize(
    ("flags", "culprits"),
    [
        ("--hiden-size 16", ["--hiden-size", "--hidden-size"]),
        ("--fp16 --bf16", ["--fp16", "--bf16"]),
        ("--hidden-size 15", ["15", "2"]),
        ("--micro-batch-size 3 --global-batch-size 7", ["7", "3"]),
        ("--max-position-embeddings 4", ["8", "4"]),
        ("--lr fast", ["--lr", "fast"]),
        ("--tensor-model-parallel-size 2", ["--tensor-model-parallel-size 2", "the 1 ranks"]),
        ("--train-samples 4", ["--train-samples", "--train-iters"]),
    ],
)
def test_flags(fails, flags, culprits):
    message = fails(MOCK + flags)
    assert all(culprit in message for culprit in culprits), message


@pytest.mark.parametrize(
    ("text", "culprits"),
    [
        ('{\n  "fp16": {"enabled": true,}\n}', ["line 2", "column"]),
        (OFFLOAD_AS_PRINTED, ["line 5", "column 28", 'a comma before "}"']),
        ('{"zero_optimisation": {"stage": 1}}', ["zero_optimisation", "zero_optimization"]),
        ('{"zero_optimization": {"stage": 2}}', ["--zero-stage 3", "zero_optimization.stage"]),
        ('{"bf16": {"enabled": true}}', ["--fp16", "bf16.enabled"]),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
            ["offload_param.device", "offload_optimizer.device", "the optimizer on the CPU too"],
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}',
            ["offload_optimizer.device", "nvme", '"cpu" and "none" are'],
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 2}}}',
            ["offload_optimizer.ratio = 2", "0", "1"],
        ),
    ],
)
def test_json(fails, tmp_path, text, culprits):
    path = tmp_path / "ds.json"
    path.write_text(text)
    message = fails(f"{MOCK} --fp16 --zero-stage 3 --deepspeed_config {path}")
    assert all(culprit in message for culprit in culprits), message


@pytest.mark.parametrize(
    ("stage", "text", "culprits"),
    [
        (2, '{"zero_optimization": {"zero_hpz_partition_size": 2}}',
         ["zero_hpz_partition_size = 2", "stage = 2", "stage 3"]),
        (0, '{"zero_optimization": {"zero_quantized_gradients": true}}',
         ["zero_quantized_gradients = true", "stage = 0", "stage 1, 2 or 3"]),
        (0, '{"zero_optimization": {"zero_quantized_weights": true}}',
         ["zero_quantized_weights = true", "stage = 0"]),
        (3, '{"zeropp": {"weight_bits": 7}}', ["zeropp.weight_bits = 7", "4, 8, 16"]),
        (3, '{"zeropp": {"gradient_bits": [8, 2]}}', ["gradient_bits = 2", "3, 4, 8, 16"]),
        (3, '{"zeropp": {"gradient_bits": 3}}', ["gradient_bits = [3, 3]", "as in [8, 3]"]),
        (3, '{"zeropp": {"gradient_bits": [8, 8, 4]}}', ["[8, 8, 4]", "two values"]),
        (3, '{"zeropp": {"ranks_per_node": 0}}', ["ranks_per_node = 0", "at least 1"]),
    ],
)  # fmt: skip
def test_zeropp(fails, tmp_path, stage, text, culprits):
    path = tmp_path / "ds.json"
    path.write_text(text)
    message = fails(f"{MOCK} --zero-stage {stage} --deepspeed_config {path}")
    assert all(culprit in message for culprit in culprits), message
    assert message.startswith("error: ") and "\n" not in message


def test_missing_data(fails, tmp_path):
    assert "nowhere" in fails(f"{DATA} {tmp_path}/nowhere")


def test_empty_data(fails, tmp_path):
    (tmp_path / "void.bin").touch()
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 1)
    (tmp_path / "void.idx").write_bytes(header + struct.pack("<q", 0))
    message = fails(f"{DATA} {tmp_path}/void")
    assert "void" in message and "no " in message


@pytest.mark.parametrize("weight", ["-1", "nan", "inf", "-inf", "0", "much"])
def test_a_weight_that_is_none(fails, prefix, weight):
    message = fails(f"{DATA} {weight} {prefix} 2 {prefix}")
    assert f"'{weight}' is not a weight above 0" in message
    assert f"'{weight}' is not a weight above 0" in fails(f"{DATA} 2 {prefix} {weight} {prefix}")


@pytest.mark.parametrize("split", ["0,0,0", "-1,2", "nan,1,1", "1,2,3,4", ","])
def test_a_split_that_is_none(fails, prefix, split):
    assert f"--split '{split}'" in fails(f"{DATA} {prefix} --split {split}")


def test_an_empty_split(fails, prefix):
    assert "--split needs a value" in fails(f"{DATA} {prefix} --split=")


def test_split_without_documents(fails, prefix):
    message = fails(f"{DATA} {prefix} --split 999,1,0 --eval-iters 1")
    assert "999,1,0" in message and "40" in message


@pytest.mark.parametrize(
    ("source", "culprit"), [("--split 0,1,0 --data-path", "0,1,0"), ("--valid-data-path", "train")]
)
def test_no_training_data(fails, prefix, source, culprit):
    flags = f"{TINY} --tokenizer-type NullTokenizer --vocab-size 20 {source} {prefix}"
    message = fails(flags)
    assert "no training data" in message and culprit in message


def test_a_tokenizer_without_data_is_not_ignored(fails):
    assert "--tokenizer-type" in fails(f"{TINY} --tokenizer-model nowhere.json")


def test_a_prompt_that_cannot_be_encoded_is_told_before_training(fails, capsys):
    assert "'def'" in fails(f"{MOCK} --sample-prompt def --train-iters 100000")


def test_a_prompt_longer_than_the_positions_is_told_before_training(fails):
    message = fails([*f"{MOCK} --train-iters 100000 --sample-prompt".split(), "1 " * 5000])
    assert "the prompt has 5,000 tokens, but the model has" in message


def test_truncated_bin(fails, prefix):
    path = prefix.with_name(prefix.name + ".bin")
    path.write_bytes(path.read_bytes()[:-10])
    message = fails(f"{DATA} {prefix}")
    assert path.name in message and "960" in message and "950" in message


def test_a_bin_with_bytes_beyond_the_index(fails, prefix):
    path = prefix.with_name(prefix.name + ".bin")
    path.write_bytes(path.read_bytes() + bytes(10))
    message = fails(f"{DATA} {prefix}")
    assert path.name in message and "970" in message and "960" in message


def test_the_name_of_a_file_in_place_of_the_prefix(fails, prefix):
    message = fails(f"{DATA} {prefix}.bin")
    assert message.endswith(f"give the path without its ending, {prefix}")


@pytest.mark.parametrize(
    ("place", "content", "culprits"),
    [
        (slice(300, None), b"", ["300 bytes", "40 sequences"]),  # truncated
        (slice(10), b"", ["not a Megatron index"]),
        (slice(9, 10), b"\2", ["version 2", "version 1"]),
        (slice(17, 18), b"\11", ["code 9"]),
        (slice(34 + 4 * 40, 34 + 4 * 40 + 8), struct.pack("<q", 1 << 40), ["960", "109951162"]),
        (slice(34, 38), struct.pack("<i", -12), ["damaged"]),
    ],
)
def test_a_damaged_idx(fails, prefix, place, content, culprits):
    path = prefix.with_name(prefix.name + ".idx")
    whole = bytearray(path.read_bytes())
    whole[place] = content
    path.write_bytes(whole)
    message = fails(f"{DATA} {prefix}")
    assert path.name in message and all(culprit in message for culprit in culprits), message


def test_a_damaged_cache(fails, prefix, tmp_path, capsys):
    job = f"{DATA} {prefix} --split 1 --data-cache-path {tmp_path}/cache"
    assert main(job.split()) == 0
    path = next(tmp_path.glob("cache/*shuffle_index.npy"))
    whole = path.read_bytes()
    for size in (0, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = fails(job)
        assert path.name in message and "damaged" in message and "delete it" in message


def test_a_cache_of_other_data(fails, prefix, tmp_path, capsys):
    job = f"{DATA} {prefix} --split 1 --data-cache-path {tmp_path}/cache"
    assert main(job.split()) == 0
    path = next(tmp_path.glob("cache/*description.txt"))
    path.write_text(path.read_text().replace("1234", "4321"))
    message = fails(job)
    assert path.name in message and "other data" in message and "delete it" in message


def test_a_cache_that_cannot_be_written(prefix, closed):
    for path in prefix.parent.glob("text_document.*"):
        path.rename(closed.folder / path.name)
    failed = closed.run("pretrain_gpt.py", *f"{DATA} {closed.folder}/text_document".split())
    assert failed.returncode == 1 and "Traceback" not in failed.stdout + failed.stderr
    (message,) = [line for line in failed.stdout.splitlines() if line.startswith("error: ")]
    assert f"{closed.folder}/text_document/cache" in message and "Permission denied" in message
    assert "--data-cache-path" in message
    assert sorted(path.name for path in closed.folder.iterdir()) == [
        "text_document.bin",
        "text_document.idx",
    ]


def test_a_folder_for_checkpoints_that_cannot_be_written(closed):
    """At the start, not when the first checkpoint is saved."""
    failed = closed.run("pretrain_gpt.py", *f"{MOCK} --save {closed.folder}".split())
    assert failed.returncode == 2 and "Traceback" not in failed.stdout + failed.stderr
    assert failed.stdout.splitlines()[-1] == (
        f"error: --save {closed.folder} cannot be written (Permission denied): name a folder that "
        "can"
    )
    assert "iteration" not in failed.stdout and not list(closed.folder.iterdir())


def test_a_folder_for_checkpoints_that_another_job_saves_in(fails, tmp_path, capsys):
    lock = FolderLock.of(tmp_path)
    assert lock.take() is None
    message = fails(f"{MOCK} --save {tmp_path} --load {tmp_path}")
    assert f"another job saves there, process {os.getpid()} on " in message
    assert main(f"{MOCK} --load {tmp_path}".split()) == 0  # reading is allowed
    assert main(f"{MOCK} --save {tmp_path} --skip-train".split()) == 0  # it saves nothing
    assert lock.is_held()
    lock.release()
    assert main(f"{MOCK} --save {tmp_path}".split()) == 0
    assert not lock.path.exists()


def test_a_cache_on_a_full_disk(fails, prefix, tmp_path):
    with full_disk(250):
        message = fails(f"{DATA} {prefix} --split 1 --data-cache-path {tmp_path}/cache")
    assert f"{tmp_path}/cache" in message and "--data-cache-path" in message
    assert not list((tmp_path / "cache").iterdir())


def test_foreign_idx(fails, prefix):
    path = prefix.with_name(prefix.name + ".idx")
    path.write_bytes(b"TNTIDX\x00\x00" + struct.pack("<QQ", 1, 8) + bytes(40))
    assert path.name in fails(f"{DATA} {prefix}")


def test_token_outside_the_vocabulary(fails, prefix):
    message = fails(f"{DATA} {prefix} --vocab-size 5 --split 1,0,0 --train-iters 50")
    assert "vocabulary" in message and "5" in message


def test_checkpoint_of_another_architecture(fails, tmp_path, capsys):
    assert main(f"{MOCK} --save {tmp_path}".split()) == 0
    message = fails(f"{MOCK} --load {tmp_path} --hidden-size 32 --num-layers 2")
    assert "hidden_size" in message and "16" in message and "32" in message
    assert "num_layers" in message


def test_nothing_to_load(fails, tmp_path, capsys):
    assert main(f"{MOCK} --load {tmp_path}/typo".split()) == 0
    assert f"--load {tmp_path}/typo holds no checkpoint" in capsys.readouterr().out
    for flag in ("--finetune", "--exit-on-missing-checkpoint", "--use-checkpoint-args"):
        message = fails(f"{MOCK} --load {tmp_path}/typo {flag}")
        assert flag in message and "typo holds no checkpoint" in message


def test_sequences_longer_than_the_checkpoint_has_positions(fails, tmp_path):
    assert main(f"{MOCK} --save {tmp_path}".split()) == 0
    message = fails(f"{MOCK} --load {tmp_path} --use-checkpoint-args --seq-length 16")
    assert "16" in message and "--max-position-embeddings 8" in message


def test_loss_that_is_not_a_number(fails):
    message = fails(f"{MOCK} --train-iters 50 --lr 1e30 --clip-grad 0 --weight-decay 0")
    assert "no update was made" in message and "Lower --lr" in message


def test_loss_scale_that_cannot_fall(fails):
    message = fails(f"{MOCK} --fp16 --initial-loss-scale 1e30 --min-loss-scale 1e30 --hysteresis 1")
    assert "smallest loss scale" in message
