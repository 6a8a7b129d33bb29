"""Run the tests and benchmarks that need a GPU, and write one Markdown file with the results.

    python benchmarks/gpu.py [--minutes 10] [--output FILE.md] [--only STEP ...] [--keep FOLDER]
        [--wheels FOLDER]

Works in a fresh clone without installation and without a network: the libraries of csrc/ are built
in place, if they are older than their sources. The steps that tell most come first. Each has a time
limit, a share of all minutes. If one fails or runs out of time, the others still run, and the file
is written again after each, and when Ctrl-C or SIGTERM ends the program. The exit status is 1 if a
step failed. --tiny tries the program itself where there is no GPU.
"""

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from benchmarks.shared.gpu_report import (
    Describe,
    Outcome,
    describe_build,
    describe_output,
    describe_tests,
    machine_facts,
    markdown,
)
from benchmarks.shared.result import write_text
from benchmarks.shared.time_limited_command import INTERRUPTED, run_with_limit
from zeropp.native.library import SUFFIX
from zeropp.ranks.topology import usable_cores

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = MappingProxyType(
    {
        "cpu": ("zeropp/native/_cpu",),
        "cuda": ("zeropp/native/_cpu", "zeropp/native/_cuda"),
    }
)
STEPS = ("build", "tests", "kernels", "train", "memcheck", "racecheck")
GPU_TEST = re.compile(r"pytest\.mark\.gpu|from tests\.gpu import")  # in files with tests for GPUs
SANITIZED_TESTS = (  # all kernels, ragged and misaligned; a minute under compute-sanitizer
    "tests/zeropp/quant/test_cuda.py::test_rows_of_ragged_segments[dtype2-wire0-1]",
    "tests/zeropp/quant/test_cuda.py::test_sums_of_ragged_segments[3]",
    "tests/zeropp/quant/test_cuda.py::test_more_segments_than_a_launch_takes[57]",
    "tests/zeropp/optim/test_cuda_adam.py::test_ragged_and_wide_tensors[dtype0-copy_type1-shifts1]",
)
OUR_KERNELS = ("--kernel-name", "kns=zpp", "--error-exitcode", "9")  # checks our namespace only
EXACT_ALLOCATIONS = MappingProxyType({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
TINY_KERNELS = ("--elements", "16384", "--rounds", "2")
TINY_TRAIN = (
    *("--sizes", "tiny", "--peers", "eager", "--no-compile", "--num-workers", "0"),
    *("--rounds", "2", "--steps", "1"),
)
TRAIN_SIZES = ("--sizes", "124M", "1.3B", "350M")  # what is left when the time is up says least
SECONDS_TO_END = 40.0  # that gpu_train may need after its own limit
LEAST_SECONDS = 5.0  # with less left, a step does not begin
MOST_WORKERS = 8  # of pytest: each starts ranks, and each rank takes half a GiB of the GPU
SLOWER = "3"  # how much longer tests on ranks may take, where workers share the GPU


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command to run."""

    name: str
    title: str
    command: Sequence[str]
    share: float  # of the total time that it may take at most
    describe: Describe = describe_output
    why_not: str | None = None  # the reason if it does not run
    environment: dict[str, str] = field(default_factory=dict)
    builds: Sequence[str] = ()  # stems of libraries that must exist afterwards


def main() -> int:
    """Run the steps, write the report after each; 1 if one failed."""
    options = read_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()  # steps run in the clone's root
        folder.mkdir(parents=True, exist_ok=True)
        device, facts = machine_facts(options.device, options.commit)
        plan = [step for step in steps(device, options, folder) if step.name in options.only]
        command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
        outcomes: list[Outcome] = []
        for step in plan:
            waiting = [later.title for later in plan[len(outcomes) :]]
            write_text(options.output, markdown(command, facts, outcomes, waiting))
            print(f"{step.name}: {shown(step.command, folder)}", file=sys.stderr, flush=True)
            outcomes.append(outcome_of(step, folder, until, 60 * options.minutes))
            waiting = [later.title for later in plan[len(outcomes) :]]
            write_text(options.output, markdown(command, facts, outcomes, waiting))
            if outcomes[-1].status == "interrupted":
                break
    results = ", ".join(f"{outcome.title}: {outcome.status}" for outcome in outcomes)
    print(f"{options.output}: {results}")
    failed = any(outcome.status not in ("ok", "not run") for outcome in outcomes)
    return 1 if failed else 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--minutes", type=float, default=10.0, help="for all steps together (default: 10)")
    add("--only", nargs="+", choices=STEPS, default=STEPS, help="default: all, in this order")
    add("--output", type=Path, help="default: benchmarks/results/DATE-gpu.md")
    add("--keep", type=Path, metavar="FOLDER", help="for complete outputs and the JSON")
    add("--commit", help="the commit to report if this is not a git clone")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels of packages that are missing here")
    add("--tiny", action="store_true", help="small sizes, to try the program")
    add("--kernels-flags", default="", metavar="FLAGS", help="further flags of quantize_kernels")
    add(
        "--train-flags",
        default="",
        metavar="FLAGS",
        help='further flags of gpu_train, as in "--micro-batch 8"',
    )
    options = parser.parse_args()  # fmt: skip
    if options.output is None:
        options.output = ROOT / f"benchmarks/results/{time.strftime('%Y-%m-%d')}-gpu.md"
    return options


def steps(device: str, options: argparse.Namespace, folder: Path) -> Iterator[Step]:
    """The steps, by worth."""
    python = sys.executable
    yield Step(
        name="build",
        title="Build",
        command=(python, "setup.py", "build_ext", "--inplace"),
        share=0.2,
        describe=describe_build,
        builds=LIBRARIES[device],
    )
    pytest = (python, "-m", "pytest", "-p", "no:cacheprovider", "-q")
    yield tests_step(device, pytest)
    kernels = (python, "-m", "benchmarks.kernels.quantize_kernels", "--device", device)
    kernels += ("--json", str(folder / "kernels.json"), *(TINY_KERNELS if options.tiny else ()))
    yield Step(
        name="kernels",
        title="Kernels",
        command=(*kernels, *shlex.split(options.kernels_flags)),
        share=0.15,
    )
    train = (python, "-m", "benchmarks.step.gpu_train", "--device", device, *TRAIN_SIZES)
    train += ("--json", str(folder / "train.json"), *(TINY_TRAIN if options.tiny else ()))
    yield Step(
        name="train",
        title="Training",
        command=(*train, *shlex.split(options.train_flags)),
        share=0.35,
    )
    for tool, flags in (("memcheck", ("--report-api-errors", "no")), ("racecheck", ())):
        sanitizer = ("compute-sanitizer", "--tool", tool, *OUR_KERNELS, *flags)
        yield Step(
            name=tool,
            title=f"compute-sanitizer, {tool}",
            command=(*sanitizer, *pytest, *SANITIZED_TESTS),
            share=0.2,
            environment=dict(EXACT_ALLOCATIONS),
            why_not=why_no_sanitizer(device),
        )


def tests_step(device: str, pytest: Sequence[str]) -> Step:
    """The tests that need a GPU, which are skipped on a CPU."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if GPU_TEST.search(path.read_text())
    ]
    flags = ("-m", "gpu", "-rsfE", "--tb=short", "--continue-on-collection-errors")
    workers = min(MOST_WORKERS, len(usable_cores()) // 2)
    environment = {"RANKS_MAY_TAKE": SLOWER} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    if workers > 1 and importlib.util.find_spec("xdist"):
        flags += ("-n", str(workers), "--dist", "worksteal")
    return Step(
        name="tests",
        title="Tests",
        command=(*pytest, *flags, *files),
        share=0.35,
        describe=partial(describe_tests, device == "cuda"),
        environment=environment,
    )


def outcome_of(step: Step, folder: Path, until: float, total: float) -> Outcome:
    """Run a step as `run_step` does; whatever goes wrong is its outcome, and the rest goes on."""
    try:
        return run_step(step, folder, until, total)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the report shows it)
        text = "".join(traceback.format_exception(error))
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        command = shown(step.command, folder)
        return Outcome(title=step.title, command=command, status=status, body=f"```\n{text}```")


def run_step(step: Step, folder: Path, until: float, total: float) -> Outcome:
    """Run a step within its limit and the time left; `total` is that of all steps, in seconds."""
    command = list(step.command)
    if step.why_not:
        return Outcome(
            title=step.title, command=shown(command, folder), status="not run", body=step.why_not
        )
    limit = min(step.share * total, until - time.monotonic())
    if limit < min(LEAST_SECONDS, step.share * total):
        return Outcome(
            title=step.title, command=shown(command, folder), status="not run", body="No time left."
        )
    if step.name == "train":
        command += ["--minutes", f"{max(limit - SECONDS_TO_END, limit / 2) / 60:.2f}"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment |= step.environment
    result = run_with_limit(command, environment, folder / step.name, limit)
    body, described_status = step.describe(result)
    status = "ok" if result.status == 0 else "failed"
    if result.status in (None, INTERRUPTED):
        status = "interrupted" if result.status == INTERRUPTED else "out of time"
    elif missing := [stem for stem in step.builds if built_library(stem) is None]:
        status = f"failed: {', '.join(missing)} not built"
    if status == "ok" and described_status:
        status = described_status
    return Outcome(
        title=step.title,
        command=shown(command, folder),
        status=status,
        body=body.replace(str(folder), "FOLDER").replace(f"{ROOT}/", ""),
        seconds=result.seconds,
        limit=limit,
    )


def shown(command: Sequence[str], folder: Path) -> str:
    """A command as a person would type it."""
    text = shlex.join("python" if word == sys.executable else word for word in command)
    return text.replace(str(folder), "FOLDER")


def built_library(stem: str) -> Path | None:
    """The library that setup.py builds in place, if it exists."""
    path = ROOT / (stem + SUFFIX)
    return path if path.exists() else None


def why_no_sanitizer(device: str) -> str | None:
    """Why compute-sanitizer cannot run; None if it can."""
    if device == "cpu":
        return "there is no GPU"
    return None if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the PATH"


if __name__ == "__main__":
    sys.exit(main())
