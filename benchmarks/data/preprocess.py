"""Preprocessing text: tokens per CPU-second, one and two workers, memory, and the bare libraries.

The text is Python source: the standard library and the installed packages (or the .txt, .md, .rst,
.html and .py files of --input), duplicates left out, as one .jsonl. The program and the bare
library run in turn. The bare library reads GPT-2's vocabulary from the same files, and encodes the
same documents from memory with one thread. CPU time is that of all processes together, including
their start, and of the bare library including its vocabulary. Memory is the peak of the largest
process. The datasets must be equal.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.result import ROOT
from benchmarks.shared.table import Column, table

TOOL = ROOT / "tools" / "preprocess_data.py"
ENDINGS = (".txt", ".md", ".rst", ".html", ".py")
LIBRARIES = ("tiktoken", "fastokens")
MEGATRON_RATE = 0.5e6  # tokens per CPU-second of Megatron-LM's program, measured by this project
BARE_PROGRAM = """
import json, sys, time
from megatron_zpp.tokenizer.fast_gpt2 import FastGPT2
from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer
source, library, vocab, merges = sys.argv[1:]
tokenizer = GPT2BPETokenizer(vocab, merges) if library == "tiktoken" else FastGPT2(vocab, merges)
with open(source) as file:
    texts = [json.loads(line)["text"] for line in file]
tokens = 0
for start in range(0, len(texts), 100):
    batch = texts[start : start + 100]
    if library == "tiktoken":
        tokens += sum(len(tokenizer._encoding.encode_ordinary(text)) for text in batch)
    else:
        tokens += len(tokenizer._tokenizer.encode_batch_flat(batch)[0]) // 4
print(json.dumps({"cpu": time.process_time(), "tokens": tokens}))
"""


def measure(options: Options, result: dict) -> None:
    """Collect the text, time everything in turn."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "text.jsonl"
        num_bytes, num_documents = collect(source, options.input, options.megabytes * 10**6)
        result |= {"text_bytes": num_bytes, "documents": num_documents, "rounds": []}
        for number in range(options.rounds):
            result["rounds"].append(time_round(options, source))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)


def collect(target: Path, folder: str | None, limit: int) -> tuple[int, int]:
    """Write each distinct text as one line; returns the bytes of text and the documents."""
    paths = sysconfig.get_paths()
    folders = [Path(folder)] if folder else [Path(paths["stdlib"]), Path(paths["purelib"])]
    seen, num_bytes = set(), 0
    with open(target, "w") as file:
        for text in _texts(folders, ENDINGS if folder else (".py",)):
            content = text.encode()
            digest = hashlib.sha256(content).digest()
            if digest in seen:
                continue
            if num_bytes + len(content) > limit:
                break
            seen.add(digest)
            num_bytes += len(content)
            file.write(json.dumps({"text": text}) + "\n")
    return num_bytes, len(seen)


def time_round(options: Options, source: Path) -> dict:
    """Time everything once; raises Disagreement unless all datasets are equal."""
    times, digests = {}, set()
    for library in options.libraries:
        bare = [sys.executable, "-c", BARE_PROGRAM, str(source), library]
        done = subprocess.run(
            [*bare, options.vocab_file, options.merge_file], env=_environment(), check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        times[library] = {"bare": json.loads(done.stdout)}
        for workers in (1, 2):
            times[library][f"workers {workers}"] = timed(options, source, library, workers)
            dataset = source.with_name("out_text_document")
            for end in ("bin", "idx"):
                path = dataset.with_suffix(f".{end}")
                digests.add((end, hashlib.sha256(path.read_bytes()).hexdigest()))
    if len(digests) != 2:
        raise Disagreement("the datasets differ")
    return times


def timed(options: Options, source: Path, library: str, workers: int) -> dict:
    """Seconds, CPU-seconds and peak bytes of memory of one run of the program."""
    command = [
        sys.executable, str(TOOL), "--input", str(source), "--append-eod",
        "--output-prefix", str(source.with_name("out")), "--workers", str(workers),
        "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", options.vocab_file,
        "--merge-file", options.merge_file, "--bpe-library", library,
        "--log-interval", str(10**9),
    ]  # fmt: skip
    start = time.monotonic()
    with open(source.with_name("log"), "w") as log:
        process = subprocess.Popen(command, env=_environment(), stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - start
    if status:
        sys.exit(f"error: {Path(log.name).read_text()}")
    return {"wall": wall, "cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss * 1024}


def _texts(folders: Sequence[Path], endings: Sequence[str]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in endings and path.is_file():
                text = path.read_bytes().decode(errors="ignore")
                if text:
                    yield text


def _environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"
    }  # fmt: skip


def show(result: dict) -> str:
    """Medians over the rounds, for each library."""
    libraries = list(result["rounds"][0])
    tokens = result["rounds"][0][libraries[0]]["bare"]["tokens"]
    rounds = {name: [each[name] for each in result["rounds"]] for name in libraries}
    rows = table(
        [row for name in libraries for row in rows_of(name, rounds[name])],
        Column("", "name"),
        Column("wall, s", "wall", ".2f"),
        Column("CPU, s", "cpu", ".2f"),
        Column("M tokens per CPU s", lambda row: tokens / row["cpu"], ".2f", 1e-6),
        Column("x Megatron-LM", lambda row: tokens / row["cpu"] / MEGATRON_RATE, ".1f"),
        Column("x bare library", "to_bare", ".2f"),
        Column("memory, MB", "memory", ".0f", 1e-6),
    )
    scaling = "\n".join(
        f"{name}: two workers against one: {speedup(rounds[name]):.2f} times as fast"
        for name in libraries
    )
    return (
        f"{result['text_bytes'] / 1e6:.1f} MB of text, {result['documents']} documents, "
        f"{tokens / 1e6:.2f} M tokens; {len(result['rounds'])} rounds; datasets equal\n\n"
        f"{rows}\n\n{scaling}"
    )


def rows_of(library: str, rounds: Sequence[dict]) -> Iterator[dict]:
    """The bare library, and the program with one and with two workers."""
    bare = [each["bare"]["cpu"] for each in rounds]
    nothing = dict.fromkeys(("wall", "to_bare", "memory"))
    yield nothing | {"name": f"{library}, bare", "cpu": median(bare)}
    for name in ("workers 1", "workers 2"):
        runs = [each[name] for each in rounds]
        yield {
            "name": f"{library}, {name}",
            "to_bare": median(run["cpu"] / own for run, own in zip(runs, bare, strict=True)),
            **{key: median(run[key] for run in runs) for key in ("wall", "cpu", "memory")},
        }


def speedup(rounds: Sequence[dict]) -> float:
    """How much faster two workers are."""
    return median(each["workers 1"]["wall"] / each["workers 2"]["wall"] for each in rounds)


OPTIONS = (
    Flag("--vocab-file", help="GPT-2's vocab.json (encoder.json)", required=True),
    Flag("--merge-file", help="GPT-2's merges.txt (vocab.bpe)", required=True),
    Flag("--input", help="a folder with text to use instead of Python source"),
    Flag("--megabytes", 300, "at most"),
    Flag("--rounds", 3, "of everything"),
    Flag("--libraries", LIBRARIES, choices=LIBRARIES),
    Flag("--folder", help="for temporary files (default: the system's)"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
