"""Preprocessing text: tokens per CPU-second, one and two workers, memory, and the bare libraries.

    python -m benchmarks.data.preprocess --vocab-file FILE --merge-file FILE [--input FOLDER]
        [--megabytes N] [--rounds N] [--libraries NAME ...] [--json FILE]

The text is Python source: the standard library and the installed packages (or the .txt, .md, .rst,
.html and .py files of --input), duplicates left out, as one .jsonl. The program and the bare
library run in turn. The bare library reads GPT-2's vocabulary from the same files, and encodes the
same documents from memory with one thread. CPU time is that of all processes together, including
their start, and of the bare library including its vocabulary. The start alone, the time for an
input of one line, is shown too. The datasets must be equal.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.shared.result import begin, benchmark_parser, finish, heading

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"
ENDINGS = (".txt", ".md", ".rst", ".html", ".py")
LIBRARIES = ("tiktoken", "fastokens")
MEGATRON_RATE = 0.5e6  # tokens per CPU-second of Megatron-LM's program, measured by this project
MEMORY_INTERVAL = 0.25  # seconds between two readings of the memory
BARE_PROGRAM = """
import json, sys, time
cpu = time.process_time()
from megatron_zpp.tokenizer.fast_gpt2 import FastGPT2
from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer
source, library, vocab, merges = sys.argv[1:]
tokenizer = GPT2BPETokenizer(vocab, merges) if library == "tiktoken" else FastGPT2(vocab, merges)
loaded = time.process_time() - cpu
with open(source) as file:
    texts = [json.loads(line)["text"] for line in file]
cpu, tokens = time.process_time(), 0
for start in range(0, len(texts), 100):
    batch = texts[start : start + 100]
    if library == "tiktoken":
        tokens += sum(len(tokenizer._encoding.encode_ordinary(text)) for text in batch)
    else:
        tokens += len(tokenizer._tokenizer.encode_batch_flat(batch)[0]) // 4
print(json.dumps({"cpu": time.process_time() - cpu, "start": loaded, "tokens": tokens}))
"""


def main() -> int:
    """Collect the text, time everything in turn, print a table."""
    options = read_options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "text.jsonl"
        num_bytes, num_documents = collect(source, options.input, options.megabytes * 10**6)
        one_line = Path(folder) / "line.jsonl"
        one_line.write_text('{"text": "a"}\n')
        result = {
            **begin(__spec__.name),
            "text_bytes": num_bytes,
            "documents": num_documents,
            "rounds": [],
        }
        for number in range(options.rounds):
            result["rounds"].append(time_round(options, source, one_line))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--vocab-file", required=True, help="GPT-2's vocab.json (encoder.json)")
    parser.add_argument("--merge-file", required=True, help="GPT-2's merges.txt (vocab.bpe)")
    parser.add_argument("--input", metavar="FOLDER", help="text to use instead of Python source")
    parser.add_argument("--megabytes", type=int, default=300, help="at most (default: 300)")
    parser.add_argument("--rounds", type=int, default=3, help="of everything (default: 3)")
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES, help="default: both"
    )
    parser.add_argument("--folder", help="for temporary files (default: the system's)")
    return parser.parse_args()


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


def time_round(options: argparse.Namespace, source: Path, one_line: Path) -> dict:
    """Time everything once; exits unless all datasets are equal."""
    times, digests = {}, set()
    for library in options.libraries:
        bare = [sys.executable, "-c", BARE_PROGRAM, str(source), library]
        done = subprocess.run(
            [*bare, options.vocab_file, options.merge_file], env=_environment(), check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        times[library] = {"bare": json.loads(done.stdout)}
        times[library]["start"] = timed(options, one_line, library, 1)
        for workers in (1, 2):
            times[library][f"workers {workers}"] = timed(options, source, library, workers)
            dataset = source.with_name("out_text_document")
            for end in ("bin", "idx"):
                path = dataset.with_suffix(f".{end}")
                digests.add((end, hashlib.sha256(path.read_bytes()).hexdigest()))
    if len(digests) != 2:
        sys.exit("error: the datasets differ")
    return times


def timed(options: argparse.Namespace, source: Path, library: str, workers: int) -> dict:
    """Seconds, CPU-seconds and peak bytes of memory of one run of the program."""
    command = [
        sys.executable, str(TOOL), "--input", str(source), "--append-eod",
        "--output-prefix", str(source.with_name("out")), "--workers", str(workers),
        "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", options.vocab_file,
        "--merge-file", options.merge_file, "--bpe-library", library,
        "--log-interval", str(10**9),
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    process = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    readings: list[int] = [0]
    watcher = threading.Thread(target=_read_memory, args=(process, readings))
    watcher.start()
    output = process.communicate()[0]
    wall = time.monotonic() - start
    watcher.join()
    if process.returncode:
        sys.exit(f"error: {output}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu, "memory": max(readings)}


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


def _read_memory(process: subprocess.Popen, readings: list[int]) -> None:
    """Append the bytes of a process and its children until it ends; shared pages count once."""
    while process.poll() is None:
        pids = [process.pid, *_children(process.pid)]
        readings.append(sum(_held(pid) for pid in pids))
        time.sleep(MEMORY_INTERVAL)


def _children(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended
        return []
    return [int(child) for child in children.split()]


def _held(pid: int) -> int:
    """Bytes of a process; of shared pages this process's proportional part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def show(result: dict) -> None:
    """Print the table: medians over the rounds."""
    libraries = list(result["rounds"][0])
    print(heading(result, "python"))
    tokens = result["rounds"][0][libraries[0]]["bare"]["tokens"]
    print(
        f"{result['text_bytes'] / 1e6:.1f} MB of text, {result['documents']} documents, "
        f"{tokens / 1e6:.2f} M tokens; {len(result['rounds'])} rounds; datasets equal\n"
    )
    print(
        f"  {'':22} {'wall s':>7} {'CPU s':>7} {'M tokens':>9} {'x Mega-':>8} {'x bare':>7} "
        f"{'the same':>9} {'memory':>7}\n"
        f"  {'':22} {'':>7} {'':>7} {'per CPU s':>9} {'tron-LM':>8} {'library':>7} "
        f"{'but start':>9} {'MB':>7}"
    )
    for library in libraries:
        rounds = [each[library] for each in result["rounds"]]
        _show_library(library, rounds, tokens)


def _show_library(library: str, rounds: Sequence[dict], tokens: int) -> None:
    bare = [each["bare"]["start"] + each["bare"]["cpu"] for each in rounds]
    start = statistics.median(each["bare"]["start"] for each in rounds)
    print(
        f"  {library + ', bare, start':22} {'':7} {start:7.2f}\n"
        f"  {library + ', bare':22} {'':7} {statistics.median(bare):7.2f} "
        f"{tokens / statistics.median(bare) / 1e6:9.2f}"
    )
    for name in ("start", "workers 1", "workers 2"):
        runs = [each[name] for each in rounds]
        wall, cpu = (statistics.median(run[key] for run in runs) for key in ("wall", "cpu"))
        line = f"  {library + ', ' + name:22} {wall:7.2f} {cpu:7.2f}"
        if name != "start":
            ratio = statistics.median(r["cpu"] / b for r, b in zip(runs, bare, strict=True))
            steady = statistics.median(
                (each[name]["cpu"] - each["start"]["cpu"]) / each["bare"]["cpu"] for each in rounds
            )
            line += (
                f" {tokens / cpu / 1e6:9.2f} {tokens / cpu / MEGATRON_RATE:8.1f} {ratio:7.2f} "
                f"{steady:9.2f} {max(run['memory'] for run in runs) / 1e6:7.0f}"
            )
        print(line)
    one, two, start = (
        [each[name]["wall"] for each in rounds] for name in ("workers 1", "workers 2", "start")
    )
    scaling = statistics.median(a / b for a, b in zip(one, two, strict=True))
    steady = statistics.median((a - s) / (b - s) for a, b, s in zip(one, two, start, strict=True))
    print(f"  two workers against one: {scaling:.2f} times as fast, without the start {steady:.2f}")


if __name__ == "__main__":
    sys.exit(main())
