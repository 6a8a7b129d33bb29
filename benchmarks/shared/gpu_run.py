"""All that is asked of a machine with a GPU, in one go: its tests and benchmarks, as Markdown.

    python benchmarks/gpu.py [--minutes 10] [--output FILE.md] [--only STEP ...] [--keep FOLDER]

It runs in a fresh clone without installation and without a network: the libraries of csrc/ are
built in place. Each step has a time limit; what fails or runs out of time does not stop the rest,
and after each step the file is written anew. The exit status is 1 if a step failed. With --tiny the
script itself is tried where there is no GPU.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.shared.limited import run_limited  # noqa: E402

from benchmarks.shared.gpu_report import (  # noqa: E402
    Outcome,
    State,
    Told,
    compiled,
    counted,
    facts,
    output,
    report,
)
from zeropp.atomic import write_atomically  # noqa: E402

LIBRARIES = MappingProxyType(
    {"cpu": ("zeropp/_kernels",), "cuda": ("zeropp/_kernels", "zeropp/_cuda")}
)
MARKED = re.compile(r"pytest\.mark\.gpu|from tests\.gpu import")  # a file with tests for GPUs
SANITIZED = (  # every kernel, ragged and misaligned; in a minute, though each access is watched
    "tests/zeropp/quant/test_cuda.py::test_rows_of_ragged_segments[dtype2-wire0-1]",
    "tests/zeropp/quant/test_cuda.py::test_sums_of_ragged_segments[3]",
    "tests/zeropp/quant/test_cuda.py::test_more_segments_than_a_launch_takes[57]",
    "tests/zeropp/optim/test_cuda_adam.py::test_ragged_and_wide_tensors[dtype0-copy_type1-shifts1]",
)
OURS_ONLY = ("--kernel-name", "kns=zpp", "--error-exitcode", "9")  # what to watch: our namespace
EXACT_ALLOCATIONS = MappingProxyType({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
TINY_KERNELS = ("--elements", "16384", "--rounds", "2")
TINY_TRAIN = (
    *("--sizes", "tiny", "--peers", "eager", "--no-compile", "--num-workers", "0"),
    *("--rounds", "2", "--steps", "1"),
)
MARGIN = 40.0  # seconds that gpu_train.py may need to end after its own limit


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something to run."""

    name: str
    title: str
    command: Sequence[str]
    share: float  # of the whole time that it may take at most
    tell: Told = output
    why_not: str | None = None  # it does not run
    environment: dict[str, str] = field(default_factory=dict)
    makes: Sequence[str] = ()  # stems of libraries that must be there afterwards


def main() -> int:
    """Run the steps, write the report after each; 1 if one failed."""
    options = read_options()
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        keep = (options.keep or Path(folder)).resolve()  # steps run in the project's folder
        keep.mkdir(parents=True, exist_ok=True)
        found, known = facts(options.device, options.commit)
        plan = [step for step in steps(found, options, keep) if step.name in options.only]
        command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
        state = State(command=command, facts=known)
        for step in plan:
            print(f"{step.name}: {spoken(step.command, keep)}", file=sys.stderr, flush=True)
            state.outcomes.append(carry_out(step, keep, until, 60 * options.minutes))
            state.waiting = [one.title for one in plan[len(state.outcomes) :]]
            text = report(state)
            write_atomically(options.output, partial(write, text))
    print(f"{options.output}: " + ", ".join(f"{one.title}: {one.status}" for one in state.outcomes))
    return 1 if any(one.status not in ("ok", "not run") for one in state.outcomes) else 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ("build", "tests", "memcheck", "racecheck", "kernels", "train")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--minutes", type=float, default=10.0, help="for all together (default: 10)")
    add("--only", nargs="+", choices=names, default=names, help="default: all, in this order")
    add("--output", type=Path, help="default: benchmarks/results/DATE-gpu.md")
    add("--keep", type=Path, metavar="FOLDER", help="for whole outputs and the JSON")
    add("--commit", help="what to call this copy of the project where it is no git clone")
    add("--tiny", action="store_true", help="small sizes, to try the script")
    add("--kernels-flags", default="", metavar="FLAGS", help="more, for kernels.py")
    add("--train-flags", default="", metavar="FLAGS", help='more, as "--micro-batch 8"')
    options = parser.parse_args()
    if options.output is None:
        options.output = ROOT / f"benchmarks/results/{time.strftime('%Y-%m-%d')}-gpu.md"
    return options


def steps(device: str, options: argparse.Namespace, keep: Path) -> Iterator[Step]:
    """What is to be run, the last with what time is left."""
    python, seen = sys.executable, {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    for_kernels = (*(TINY_KERNELS if options.tiny else ()), *shlex.split(options.kernels_flags))
    for_train = (*(TINY_TRAIN if options.tiny else ()), *shlex.split(options.train_flags))
    missing = missing_libraries(device)
    yield Step(
        name="build", title="Build", share=0.25, makes=LIBRARIES[device], tell=compiled,
        command=(python, "setup.py", "build_ext", "--inplace"),
        why_not=None if missing else "the libraries are there, newer than csrc/",
    )  # fmt: skip
    marked = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))
              if MARKED.search(path.read_text())]  # fmt: skip
    pytest = (python, "-m", "pytest", "-p", "no:cacheprovider", "-q")
    xml = keep / "tests.xml"
    xml.unlink(missing_ok=True)
    yield Step(
        name="tests", title="Tests", share=0.25, environment=seen,
        tell=partial(counted, xml, device == "cuda"),
        command=(*pytest, "-m", "gpu", "-rs", "--continue-on-collection-errors",
                 f"--junitxml={xml}", *marked),
    )  # fmt: skip
    for tool, more in (("memcheck", ("--report-api-errors", "no")), ("racecheck", ())):
        yield Step(
            name=tool, title=f"compute-sanitizer, {tool}", share=0.1,
            command=("compute-sanitizer", "--tool", tool, *OURS_ONLY, *more, *pytest, *SANITIZED),
            environment=dict(EXACT_ALLOCATIONS), why_not=no_sanitizer(device),
        )  # fmt: skip
    yield Step(
        name="kernels", title="Kernels", share=0.15,
        command=(python, "benchmarks/kernels/quantize_kernels.py", "--device", device, "--json",
                 str(keep / "kernels.json"), *for_kernels),
    )  # fmt: skip
    yield Step(
        name="train", title="Training", share=1.0,
        command=(python, "benchmarks/step/gpu_train.py", "--device", device, "--json",
                 str(keep / "train.json"), *for_train),
    )  # fmt: skip


def carry_out(step: Step, keep: Path, until: float, whole: float) -> Outcome:
    """Run a step within its limit and what time is left; what came of it."""
    if step.why_not:
        return Outcome(title=step.title, command=spoken(step.command, keep), status="not run",
                       body=step.why_not)  # fmt: skip
    limit = max(0.0, min(step.share * whole, until - time.monotonic()))
    command = list(step.command)
    if step.name == "train":
        command += ["--minutes", f"{max(limit - MARGIN, limit / 2) / 60:.2f}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = run_limited(command, ROOT, environment | step.environment, keep / step.name, limit)
    status = "ok" if done.status == 0 else "failed"
    if done.status is None:
        status = "out of time"
    elif lost := [stem for stem in step.makes if built(stem) is None]:
        status = f"failed: no {', '.join(lost)} was built"
    body, verdict = step.tell(done)
    body = body.replace(str(keep), "FOLDER").replace(f"{ROOT}/", "")
    return Outcome(
        title=step.title, command=spoken(command, keep), body=body, seconds=done.seconds,
        limit=limit, status=verdict or status if status == "ok" else status,
    )  # fmt: skip


def spoken(command: Sequence[str], keep: Path) -> str:
    """A command as a person would type it."""
    text = shlex.join("python" if word == sys.executable else word for word in command)
    return text.replace(str(keep), "FOLDER")


def missing_libraries(device: str) -> list[str]:
    """Stems of libraries that are not there for this interpreter, or older than their sources."""
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc").iterdir())
    found = {stem: built(stem) for stem in LIBRARIES[device]}
    return [stem for stem, path in found.items()
            if path is None or path.stat().st_mtime < newest]  # fmt: skip


def built(stem: str) -> Path | None:
    """The library that setup.py builds in place, if it is there."""
    path = ROOT / (stem + sysconfig.get_config_var("EXT_SUFFIX"))
    return path if path.exists() else None


def no_sanitizer(device: str) -> str | None:
    """Why compute-sanitizer cannot run."""
    if device == "cpu":
        return "there is no GPU"
    return None if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the PATH"


def write(text: str, file) -> None:
    file.write(text.encode())


if __name__ == "__main__":
    sys.exit(main())
