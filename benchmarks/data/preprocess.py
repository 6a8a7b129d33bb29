"""Text to tokens: tokens per CPU-second, two workers against one, memory, and the bare libraries.

    python benchmarks/data/preprocess.py --vocab-file FILE --merge-file FILE [--input FOLDER]
        [--megabytes N] [--rounds N] [--libraries NAME ...] [--json FILE]

The text is Python source: the standard library and the packages that are installed, each different
file once (or the .txt, .md, .rst, .html and .py files of --input), as one .jsonl. Program and bare
library run in turn. The bare library reads GPT-2's vocabulary from the same files, is given the
same documents in memory and encodes them, with one thread. CPU time is that of all processes
together, start included, and of the library its vocabulary included; the start, the time for an
input of one line, is stated too. The datasets must be equal.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402

TOOL = ROOT / "tools" / "preprocess_data.py"
ENDINGS = (".txt", ".md", ".rst", ".html", ".py")
LIBRARIES = ("tiktoken", "fastokens")
MEGATRON = 0.5e6  # tokens per CPU-second of Megatron-LM's program, as measured for this project
LOOKS = 0.25  # seconds between two looks at the memory
BARE = """
import json, sys, time
cpu = time.process_time()
from megatron_zpp.tokenizer.fast_gpt2 import FastGPT2
from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer
source, library, vocab, merges = sys.argv[1:]
made = GPT2BPETokenizer(vocab, merges) if library == "tiktoken" else FastGPT2(vocab, merges)
loaded = time.process_time() - cpu
with open(source) as file:
    texts = [json.loads(line)["text"] for line in file]
cpu, tokens = time.process_time(), 0
for start in range(0, len(texts), 100):
    if library == "tiktoken":
        tokens += sum(len(made._encoding.encode_ordinary(t)) for t in texts[start : start + 100])
    else:
        tokens += len(made._tokenizer.encode_batch_flat(texts[start : start + 100])[0]) // 4
print(json.dumps({"cpu": time.process_time() - cpu, "start": loaded, "tokens": tokens}))
"""


def main() -> int:
    """Collect the text, run in turn, print a table."""
    options = read_options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "text.jsonl"
        num_bytes, num_documents = collect(source, options.input, options.megabytes * 10**6)
        one_line = Path(folder) / "line.jsonl"
        one_line.write_text('{"text": "a"}\n')
        result = {
            **begin("preprocess"),
            "text_bytes": num_bytes,
            "documents": num_documents,
            "rounds": [],
        }
        for number in range(options.rounds):
            result["rounds"].append(round_of(options, source, one_line))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    finish(result, show, options.json)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab-file", required=True, help="GPT-2's vocab.json (encoder.json)")
    parser.add_argument("--merge-file", required=True, help="GPT-2's merges.txt (vocab.bpe)")
    parser.add_argument("--input", metavar="FOLDER", help="text to use instead")
    parser.add_argument("--megabytes", type=int, default=300, help="at most (default: 300)")
    parser.add_argument("--rounds", type=int, default=3, help="of everything (default: 3)")
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES, help="default: both"
    )
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    add_json(parser)
    return parser.parse_args()


def collect(target: Path, folder: str | None, limit: int) -> tuple[int, int]:
    """Write each different text once, a line for each; returns bytes of text and documents."""
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


def round_of(options: argparse.Namespace, source: Path, one_line: Path) -> dict:
    """Everything once, in turn; ends the program unless all datasets are equal."""
    found, digests = {}, set()
    for library in options.libraries:
        bare = [sys.executable, "-c", BARE, str(source), library]
        done = subprocess.run(
            [*bare, options.vocab_file, options.merge_file], env=_environment(), check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        found[library] = {"bare": json.loads(done.stdout)}
        found[library]["start"] = timed(options, one_line, library, 1)
        for workers in (1, 2):
            found[library][f"workers {workers}"] = timed(options, source, library, workers)
            made = source.with_name("out_text_document")
            for end in ("bin", "idx"):
                path = made.with_suffix(f".{end}")
                digests.add((end, hashlib.sha256(path.read_bytes()).hexdigest()))
    if len(digests) != 2:
        sys.exit("error: the datasets differ")
    return found


def timed(options: argparse.Namespace, source: Path, library: str, workers: int) -> dict:
    """Seconds, CPU-seconds and most bytes of memory of one run of the program."""
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
    most = [0]
    watcher = threading.Thread(target=_watch, args=(process, most))
    watcher.start()
    said = process.communicate()[0]
    wall = time.monotonic() - start
    watcher.join()
    if process.returncode:
        sys.exit(f"error: {said}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu, "memory": most[0]}


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


def _watch(process: subprocess.Popen, most: list[int]) -> None:
    """Keep the most that a process and its children held at once, each shared page counted once."""
    while process.poll() is None:
        most[0] = max(most[0], sum(_held(pid) for pid in [process.pid, *_children(process.pid)]))
        time.sleep(LOOKS)


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def _held(pid: int) -> int:
    """Bytes: of a page that several processes share, the part of this one."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def show(result: dict) -> None:
    """Print the tables: medians over the rounds."""
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
                f" {tokens / cpu / 1e6:9.2f} {tokens / cpu / MEGATRON:8.1f} {ratio:7.2f} "
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
