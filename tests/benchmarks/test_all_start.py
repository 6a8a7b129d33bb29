"""Every benchmark starts with its smallest setting, and prints tables and JSON that are true."""

import importlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster.network import emulation
from benchmarks.convergence import convergence
from megatron_zpp.data.indexed_dataset import write_dataset
from tests.benchmarks.started import run_benchmark
from tests.launched import ROOT
from zeropp.errors import InputError

TINY = "--layers 1 --hidden 32 --heads 2 --seq 16 --vocab 64"
GPT2 = ROOT / "tests" / "data" / "gpt2_part"


@dataclass(frozen=True)
class Start:
    """Flags, in which FOLDER is a temporary one, words that are printed, and what must hold."""

    flags: str
    words: str
    holds: Callable[[dict], object] = lambda result: True
    package: str = "torch"


def loader(result: dict) -> None:
    assert [row["name"] for row in result["steps"]] == ["in memory", "0 workers", "1 workers"]
    assert all(len(row["seconds"]) == len(row["waited"]) == 2 for row in result["steps"])


def preprocess(result: dict) -> None:
    assert (result["documents"], result["text_bytes"]) == (2, len("one textanother text"))
    runs = result["rounds"][0]["tiktoken"]
    assert runs["workers 1"]["cpu"] > 0 and runs["workers 2"]["memory"] > 10**7


def sample_index(result: dict) -> None:
    assert list(result["parts"]) == ["document", "sample", "shuffle", "blend"]
    assert all(len(times) == 2 for part in result["parts"].values() for times in part.values())


def generate(result: dict) -> None:
    for size, rows in zip(result["sizes"], (1, 3), strict=True):
        assert size["rows"] == rows and len(size["seconds"]) == 3
        assert all(len(times) == 2 and min(times) > 0 for times in size["seconds"].values())


def muon_step(result: dict) -> None:
    (comparison,) = result["comparisons"]
    adamw, *muons = comparison["loops"]
    assert adamw["ratio"] == 1 and adamw["operations"] == 0 and adamw["state_bytes"] == 8
    for row in muons:
        assert row["state_bytes"] == 4 and row["operations"] > 0 and row["ratio"] > 0
        assert 0 <= comparison["verified"][row["name"]] < 0.1


def save_stall(result: dict) -> None:
    stalls = result["stall"]
    assert {way: len(times) for way, times in stalls.items()} == dict.fromkeys(stalls, 2)
    assert result["bytes"] > 12 * result["parameters"]
    pairs = zip(result["complete"], stalls["asynchronous"], strict=True)
    assert all(complete > stall for complete, stall in pairs)


def train_step(result: dict) -> None:
    names = [comparison["name"] for comparison in result["comparisons"]]
    kinds = ("2 ranks, stage 3", "2 ranks, ZeRO++")
    of_ranks = [f"{kind}, {dtype}" for kind in kinds for dtype in ("fp32", "bf16")]
    assert names == ["one rank, fp32", *of_ranks]
    for comparison in result["comparisons"]:
        verified = comparison["verified"]
        for what, allowed in verified["allowed"].items():
            assert 0 <= verified["differences"][what] <= allowed
        first, *others = comparison["loops"]
        assert first["name"] == comparison["reference"] and first["ratio"] == 1
        for loop in others:
            assert loop["ratio"] == pytest.approx(loop["median"] / first["median"])
            assert len(loop["seconds"]) == result["rounds"] and min(loop["seconds"]) > 0
    assert len(result["memory"]) == 8  # two dtypes at four stages
    for row in result["memory"]:
        assert row["measured"] == pytest.approx(row["formula"], rel=0.1), row


def dry_run(result: dict) -> None:
    for row in result["rows"]:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.1)


def attach_losses(result: dict) -> None:
    (row,) = result["rows"]
    assert row["attached"] == pytest.approx(row["loss"], rel=5e-3)  # what INT8 may move a loss by
    assert 5 * row["sent"] < row["plain"] and 12 * row["forecast_of_4"] < row["plain_of_4"]


def traffic_at_scale(result: dict) -> None:
    """Rows of 300 words over 12 ranks and the small vectors are padded: hence 3%."""
    assert all(row["ledger"] == row["forecast"] for row in result["rows"])
    across = {row["name"]: row["ledger"]["across_nodes"] for row in result["rows"]}
    hop, ring = 2 / 3, 11 / 12  # of 3 nodes, of 12 ranks
    blocks = 2 * 12 * 256**2 / result["parameters"]  # the root is gathered once, not twice
    assert across["ZeRO-3"] == pytest.approx((1 + blocks) * ring + hop, rel=0.03)
    assert across["hpZ"] == pytest.approx(2 * hop, rel=0.03)
    assert across["qgZ"] == pytest.approx((1 + blocks) * ring + hop * 4.125 / 16, rel=0.03)
    assert across["all three"] == pytest.approx(hop * (8.0625 + 4.125) / 16, rel=0.05)


def quantize_kernels(result: dict) -> None:
    assert result["wrong"] == [] and len({row["kernel"] for row in result["rows"]}) == 23
    for row in result["rows"]:
        assert len(row["seconds"]) == len(row["copy"]) == 2 and len(row["plain"]) == 1
        ratios = [c / s for c, s in zip(row["copy"], row["seconds"], strict=True)]
        assert row["ratio"] == pytest.approx(sum(ratios) / 2) and row["in_cache"] is None


def offload(result: dict) -> None:
    assert [len(row["seconds"]) for row in (*result["train"], *result["ranks"])] == [2] * 5


LOADER = (
    "--data-path FOLDER/text --split 1 --tokenizer-type NullTokenizer --vocab-size 50 --num-layers "
    "1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 20000"
)
STARTS = {
    "convergence.attach_losses": Start("--trainers FSDP2 --steps 2", "trainer", attach_losses),
    "cluster.traffic_at_scale": Start(
        "--nodes 3 --ranks-per-node 4 --layers 2 --hidden 256 --heads 4 --seq 8 --vocab 300",
        "3 nodes of 4 ranks; 1 micro-batch(es) per step",
        traffic_at_scale,
    ),
    "data.loader": Start(f"--workers 0 1 --rounds 2 -- {LOADER}", "batches equal", loader),
    "data.preprocess": Start(
        f"--rounds 1 --input FOLDER/texts --libraries tiktoken --vocab-file {GPT2}/vocab.json "
        f"--merge-file {GPT2}/merges.txt",
        "two workers against one: ",
        preprocess,
    ),
    "data.sample_index": Start(
        "--documents 1000 --epochs 3 --rounds 2", "arrays equal", sample_index
    ),
    "kernels.quantize_kernels": Start(
        "--device cpu --rounds 2 --elements 8192 16384",
        "every one wrote the reference's bytes",
        quantize_kernels,
    ),
    "memory.dry_run": Start("--only --zero-stage@2@--global-batch-size@8", "predicted", dry_run),
    "plan.plan_check": Start("--only sdp4bit", "median error"),
    "step.step_profile": Start(
        "--device cpu --sizes tiny --no-compile --loops ours eager", "tiny, eager: ms of copies"
    ),
    "step.generate": Start(
        "--layers 2 --hidden 192 --prompt 12 --tokens 6 --rows 1 3 --rounds 2",
        "tokens equal",
        generate,
        "transformers",
    ),
    "step.muon_step": Start(
        f"{TINY} --micro-batch 1 --tokens 32 --rounds 1 --ranks 2", "32 tokens per rank", muon_step
    ),
    "step.offload": Start(
        f"--device cpu --rounds 2 --turns 1 --ranks 1 2 --parameters 1 {TINY}",
        "on the host, beside the next step",
        offload,
    ),
    "step.save_stall": Start(
        f"{TINY} --rounds 2 --folder FOLDER", "equal byte by byte; 2 rounds", save_stall
    ),
    "step.train_step": Start(
        f"{TINY} --rounds 1 --ranks 2 --memory-ranks 2", "bytes per parameter", train_step
    ),
}
# Long ones, those that need root or nvcc, and those with tests of their own.
OTHERS = (
    "cluster.cluster", "cluster.time_to_loss", "codes.device_coder", "codes.gradient_codes",
    "convergence.convergence", "convergence.numerics", "endurance.endurance", "endurance.nodes",
    "kernels.cuda_compile", "step.first_minutes", "step.gpu_train",
)  # fmt: skip


@pytest.mark.parametrize("module", STARTS)
def test_it_runs_and_says_what_it_measured(module: str, tmp_path: Path) -> None:
    start = STARTS[module]
    pytest.importorskip(start.package)
    write_dataset(tmp_path / "text", 50, ([np.arange(length) % 50] for length in range(1, 60)))
    (tmp_path / "texts").mkdir()
    for name, text in (("a.txt", "one text"), ("b.md", "another text"), ("c.md", "one text")):
        (tmp_path / "texts" / name).write_text(text)
    path = tmp_path / "result.json"
    own, dashes, flags = start.flags.replace("FOLDER", str(tmp_path)).partition(" -- ")
    words = [word.replace("@", " ") for word in own.split()]
    done = run_benchmark(module, *words, "--json", str(path), *dashes.split(), *flags.split())
    result = json.loads(path.read_text())
    assert start.words in done.stdout and "\n| " in done.stdout
    assert result["command"].startswith(f"python -m benchmarks.{module} ")
    assert result["versions"]["torch"] and result["machine"]["cores"] > 0 and result["load"]
    start.holds(result)


@pytest.mark.parametrize("module", OTHERS)
def test_it_says_what_it_takes(module: str) -> None:
    assert "--json FILE" in run_benchmark(module, "--help").stdout


def test_all_benchmarks_are_here() -> None:
    found = {
        str(path.relative_to(ROOT / "benchmarks").with_suffix("")).replace("/", ".")
        for path in (ROOT / "benchmarks").rglob("*.py")
        if re.search(r"^BENCHMARK = ", path.read_text(), re.MULTILINE)
    }
    assert found == {*STARTS, *OTHERS}
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert all(f"benchmarks.{name}" in readme for name in found)


REFUSALS = {
    "cluster.cluster": {
        "zero4": "no configuration is called 'zero4'; expected one of fsdp2, fsdp2-ring, attach",
        "pp2-fsdp2 --one-host": "no configuration is called 'pp2-fsdp2'",
        "--rounds 0": "--rounds 0: expected at least 1",
        "--warm-up 0": "--warm-up 0: expected at least 1",
        "--nodes 1": "--nodes 1: expected at least 2",
        "--one-host --nodes 1 --ranks-per-node 1": "one rank sends nothing",
        "--one-host --rate 1gbit": "--rate sets .* --one-host has none",
        "--one-host --round-trip 20": "--round-trip sets .* --one-host has none",
        "--nodes 3 --round-trip 20": "joins two nodes, and --nodes is 3",
        "--rate 1gbit --rate fast": "the rate 'fast'",
        "--plot picture.jpg": "ends with .png",
    },
    "cluster.time_to_loss": {
        "--global-batch-size 6": "--global-batch-size 6: expected a multiple of the 4",
        "--steps 30": "--steps 30: expected a multiple of --eval-interval 20",
    },
    "convergence.convergence": {
        "--variants qwz": "--variants qwz: add baseline, to compare with",
        "--seeds 1 2 1": "--seeds 1 2 1: give each only once",
        "--steps 0": "--steps 0: expected at least 1",
        "--ranks 4 --ranks-per-node 3": "--ranks-per-node 3 does not divide --ranks 4",
        "--eval-samples 100": "--eval-samples 100: expected a multiple of 32",
        "--lr-spike 501": "--lr-spike 501: expected one of the 500 steps",
        "--plot curves.jpg": "--plot curves.jpg: expected a name that ends with .png",
        "--dtype fp32 --flags '--no-such-flag 3'": "--no-such-flag",
        "--dtype fp32 --flags '--global-batch-size 6'": "6 is not divisible",
    },
    "step.muon_step": {
        "--ranks 3": "expected a multiple of 2",
        "--tokens 40": "expected multiples of --seq",
    },
    "kernels.quantize_kernels": {"--device cpu --elements 1000": "give multiples of 2048"},
}


@pytest.mark.parametrize(
    ("module", "flags"), [(name, flags) for name, each in REFUSALS.items() for flags in each]
)
def test_what_is_impossible_is_refused_before_anything_runs(
    module: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [module, *shlex.split(flags)])
    monkeypatch.setattr(emulation, "require_namespaces", lambda: None)
    monkeypatch.setattr(convergence, "faster_dtype", lambda: "fp32")
    benchmark = importlib.import_module(f"benchmarks.{module}").BENCHMARK
    with pytest.raises(InputError, match=REFUSALS[module][flags]):
        benchmark.checked(benchmark.parse())
