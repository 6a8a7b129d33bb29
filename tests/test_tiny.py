"""The product in one test: a reader may start here.

Text becomes tokens. Four ranks, two to a node, train a GPT on them with ZeRO++: weights cross nodes
as INT8 and are kept in each node for backward, gradients cross as INT4. A second run goes on from
the middle of the first and prints the same digits. What the ranks sent is what was foretold, and a
fraction of plain ZeRO-3's. The model goes to Hugging Face, where it predicts what it predicts here.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_zpp.commands import convert_hf, evaluate, preprocess_data
from tests.launched import ROOT, launching, zeropp

RANKS, STEPS, STOP = 4, 8, 4
MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type ByteLevelTokenizer --make-vocab-size-divisible-by 1
"""
TRAINING = f"""
    --micro-batch-size 2 --global-batch-size 16 --train-iters {STEPS} --lr 5e-3 --lr-warmup-iters 2
    --data-path corpus_text_document --split 90,10,0 --num-workers 0 --log-interval 1
    --eval-interval {STEPS} --eval-iters 2 --save checkpoints --save-interval {STOP}
    --deepspeed_config zeropp.json
"""
ZEROPP = {
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,  # qwZ
        "zero_hpz_partition_size": 2,  # hpZ: of every weight, a copy in each node of two ranks
        "zero_quantized_gradients": True,  # qgZ
    },
    "zeropp": {"ranks_per_node": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokens of a real text, and with DeepSpeed's JSON."""
    folder = tmp_path_factory.mktemp("tiny")
    pages = sorted((ROOT / "docs").glob("*.md"))
    lines = (json.dumps({"text": page.read_text()}) for page in pages)
    (folder / "docs.jsonl").write_text("\n".join(lines))
    tokens = f"--input {folder}/docs.jsonl --output-prefix {folder}/corpus --append-eod"
    assert preprocess_data.main([*tokens.split(), "--tokenizer-type", "ByteLevelTokenizer"]) == 0
    (folder / "zeropp.json").write_text(json.dumps(ZEROPP))
    return folder


@pytest.fixture(scope="module")
def log(folder: Path) -> str:
    """What a whole run prints."""
    return train(folder)


def train(folder: Path, more: str = "") -> str:
    """Run `pretrain_gpt.py` on four ranks; return what it prints."""
    with launching(folder) as launch:
        process, log = launch(zeropp(RANKS, "pretrain_gpt.py", MODEL + TRAINING + more))
        assert process.wait(timeout=120) == 0, log.read_text()
        return log.read_text()


def losses(log: str) -> list[str]:
    return re.findall(r"lm loss: (\S+) \|", log)


def test_the_loss_falls(log: str) -> None:
    first, *_, last = map(float, losses(log))
    assert len(losses(log)) == STEPS
    assert first > 5 and last < first - 1, losses(log)  # 256 bytes: ln 256 is 5.5


def test_the_start_says_how_long_and_how_large(folder: Path, log: str) -> None:
    words = re.search(r"length +8 iterations, 4,096 tokens, (\S+) epochs of the data", log)
    samples = int(re.search(r"train: (\d+) samples of 32 tokens", log)[1])  # of one epoch
    assert float(words[1]) == pytest.approx(8 * 16 / samples, rel=0.06)  # two digits
    words = re.search(r"about (\S+) MiB each, the first after iteration 4, then every 4", log)
    saved = FileSystemReader(folder / "checkpoints/iter_0000008").read_metadata()
    tensors = saved.state_dict_metadata.values()
    num_bytes = sum(each.size.numel() * each.properties.dtype.itemsize for each in tensors)
    assert float(words[1]) * 2**20 == pytest.approx(num_bytes, rel=0.01)  # and steps
    assert re.search(r"\nnext checkpoint after iteration 4, in about \d+:\d\d\n", log)


def test_a_run_goes_on_to_the_same_digits(folder: Path, log: str) -> None:
    again = train(folder, f"--load checkpoints --ckpt-step {STOP}")
    assert losses(again) == losses(log)[STOP:]


def test_a_fraction_of_the_bytes_crosses_nodes(log: str) -> None:
    assert "INT8 among 2 ranks across nodes" in log and "INT4 among 2 across nodes" in log
    foretold, plain = (
        float(re.search(pattern, log)[1])
        for pattern in (r"total +(\S+) +\S+\n", r"plain ZeRO-3 .*: (\S+) times as much")
    )
    assert foretold > 0 and plain > 4, log


def test_hugging_face_predicts_what_ours_does(folder: Path, log: str) -> None:
    transformers = pytest.importorskip("transformers")
    text, exported = folder / "text.txt", str(folder / "hugging-face")
    text.write_text("ZeRO++ sends fewer bytes.")
    ours = ["--load", str(folder / "checkpoints")]
    assert convert_hf.main([*ours, "--to-hf", exported]) == 0
    measured = ["--data-path", str(text), "--dtype", "fp32", "--json", str(folder / "loss.json")]
    assert evaluate.main([*ours, *measured]) == 0
    (own,) = json.loads((folder / "loss.json").read_text())["perplexity"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    tokens = torch.tensor([tokenizer(text.read_text())["input_ids"]])
    loss = theirs(tokens, labels=tokens).loss.item()
    assert loss == pytest.approx(own["loss"], rel=1e-5)
