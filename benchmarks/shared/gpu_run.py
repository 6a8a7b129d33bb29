"""Run the tests and benchmarks that need a GPU, and write one Markdown file with the results.

Works in a fresh clone without installation and without a network: the libraries of csrc/ are built
in place, if they are older than their sources. The steps that tell most come first. Each has a time
limit, a share of all minutes. If one fails or runs out of time, the others still run, and the file
is written again after each, and when Ctrl-C or SIGTERM ends the program. The exit status is 1 if a
step failed. --tiny tries the program itself where there is no GPU.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from string import Template

from benchmarks.shared.result import ROOT, write_text
from setup import find_nvcc
from zeropp.native.library import SUFFIX
from zeropp.ranks.topology import usable_cores
from zeropp.settings import read_toml

TABLE = read_toml(__package__, "gpu_run.toml")["steps"]
STEPS = tuple(row["name"] for row in TABLE)
GPU_TEST = re.compile(r"pytest\.mark\.gpu|from tests\.gpu import")  # in files with tests for GPUs
SANITIZED_TESTS = (  # all kernels, ragged and misaligned; a minute under compute-sanitizer
    "tests/zeropp/quant/test_kernels.py::test_rows_of_ragged_segments[cuda-dtype2-wire0-3]",
    "tests/zeropp/quant/test_kernels.py::test_sums_of_ragged_segments[cuda-3]",
    "tests/zeropp/quant/test_kernels.py::test_more_segments_than_a_launch_takes[57-cuda]",
    "tests/zeropp/optim/test_adam_kernels.py::test_ragged_and_wide_tensors_that_begin_anywhere[cuda-dtype0-copy1]",
)
OUR_KERNELS = "--kernel-name kns=zpp --error-exitcode 9"  # checks our namespace only
GPU_FACTS = "name,memory.total,power.limit,clocks.max.sm,driver_version"
MISSING = "not installed"
PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest")
OUTPUT_LINES = 120  # of builds, tests and errors that are shown
SECONDS_TO_END = 20.0  # that a benchmark may need after MINUTES of its command
TABLE_MINUTES, LONG = 8.0, 14.0  # for which the table's seconds are; from which steps take more
LEAST_SECONDS = 5.0  # with less left, a step does not begin
KILL_SECONDS = 10.0  # between SIGINT, at which pytest sums up, and SIGKILL
CANNOT_START = 127  # the shell's exit status for a command that cannot be started
MOST_WORKERS = 8  # of pytest: each starts ranks, and each rank takes half a GiB of the GPU
SLOWER = "3"  # how much longer tests on ranks may take, where workers share the GPU
FACT_SECONDS = 60  # that a program which describes the machine may take
# Asked of another process, so that this one holds no GPU memory.
ENVIRONMENT_PROGRAM = """
import json, torch
from benchmarks.shared.result import environment_report
print(json.dumps([environment_report(), torch.version.cuda]))
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command to run, for at most a share of the total time; without one, as long as is left.

    environment: variables that are added. builds: stems of libraries that must exist afterwards.
    must_print: a word without which it has failed. shows_end: only the end of its output is shown.
    why_not: the reason if it does not run.
    """

    name: str
    title: str
    command: Sequence[str]
    share: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    builds: Sequence[str] = ()
    must_print: str = ""
    shows_end: bool = False
    why_not: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a step; `status` is "ok", "not run", or what went wrong."""

    title: str
    command: str
    status: str
    body: str
    times: str = " | "  # seconds and limit


def main() -> int:
    """Run the steps, write the report after each; 1 if one failed."""
    options = read_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    total = 60 * options.minutes
    until = time.monotonic() + total
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()  # steps run in the clone's root
        folder.mkdir(parents=True, exist_ok=True)
        device, facts = machine_facts(options.device, options.commit)
        plan = [step for step in steps(device, options, folder) if step.name in options.only]
        command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
        outcomes: list[Outcome] = []

        def report() -> None:
            waiting = [later.title for later in plan[len(outcomes) :]]
            write_text(options.output, markdown(command, facts, outcomes, waiting))

        for step in plan:
            report()
            print(f"{step.name}: {shown(step.command, folder)}", file=sys.stderr, flush=True)
            outcomes.append(outcome_of(step, folder, until, total))
            if outcomes[-1].status == "interrupted":
                break
        report()
    results = ", ".join(f"{outcome.title}: {outcome.status}" for outcome in outcomes)
    print(f"{options.output}: {results}")
    return int(any(outcome.status not in ("ok", "not run") for outcome in outcomes))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = ROOT / f"benchmarks/results/{time.strftime('%Y-%m-%d')}-gpu.md"
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--minutes", type=float, default=TABLE_MINUTES, help="for all steps together (default: 8)")
    add("--only", nargs="+", choices=STEPS, default=STEPS, help="default: all, in this order")
    add("--output", type=Path, default=default, help="default: benchmarks/results/DATE-gpu.md")
    add("--keep", type=Path, metavar="FOLDER", help="for complete outputs and the JSON")
    add("--commit", help="the commit to report if this is not a git clone")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels of packages that are missing here")
    add("--tiny", action="store_true", help="small sizes, to try the program")
    add("--kernels-flags", default="", metavar="FLAGS", help="further flags of quantize_kernels")
    add("--train-flags", default="", metavar="FLAGS", help="further flags of gpu_train")
    return parser.parse_args()


def steps(device: str, options: argparse.Namespace, folder: Path) -> Iterator[Step]:
    """The steps of `gpu_run.toml`, by worth."""
    on_gpu, has_long = device == "cuda", options.minutes >= LONG
    values = {
        "python": sys.executable, "device": device, "folder": folder,
        "pytest": f"{sys.executable} -m pytest -p no:cacheprovider -q", "workers": workers(),
        "gpu_tests": shlex.join(gpu_tests()), "our_kernels": OUR_KERNELS,
        "sanitized_tests": shlex.join(SANITIZED_TESTS),
    }  # fmt: skip
    environments = {
        "tests": {"RANKS_MAY_TAKE": SLOWER} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""},
        **dict.fromkeys(("memcheck", "racecheck"), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    }
    libraries = ("zeropp/native/_cpu", *(("zeropp/native/_cuda",) if on_gpu else ()))
    for row in TABLE:
        name, module = row["name"], row.get("module")
        share = row["seconds"] / 60 / TABLE_MINUTES if "seconds" in row else 1.0
        flags = [row["command"], row.get("long", "") if has_long else ""]
        flags += [row.get("tiny", "") if options.tiny else "", vars(options).get(f"{name}_flags")]
        text = Template(" ".join(filter(None, flags))).substitute(values)
        yield Step(
            name=name, title=row["title"], share=share, shows_end=row.get("shows_end", False),
            command=(*((sys.executable, "-m", module) if module else ()), *shlex.split(text)),
            environment=environments.get(name, {}), builds=libraries if name == "build" else (),
            must_print=" passed" if on_gpu and name == "tests" else "",
            why_not=why_not(row, on_gpu=on_gpu, tiny=options.tiny),
        )  # fmt: skip


def why_not(row: Mapping[str, str], *, on_gpu: bool, tiny: bool) -> str | None:
    """Why a step cannot run here; None if it can."""
    module, program = row.get("module"), row.get("needs")
    if module and find_spec(module) is None:
        return f"there is no {module}"
    if not on_gpu and (program or not (tiny or row["name"] in ("build", "tests"))):
        return "there is no GPU"
    return f"{program} is not on the PATH" if program and not shutil.which(program) else None


def workers() -> str:
    """The flags of pytest for tests in parallel; a worker has those of a kind one after another."""
    count = min(MOST_WORKERS, len(usable_cores()) // 2)
    return f"-n {count} --dist worksteal" if count > 1 and find_spec("xdist") else ""


def gpu_tests() -> list[str]:
    """The files with tests that need a GPU, which are skipped on a CPU."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if GPU_TEST.search(path.read_text())]


def outcome_of(step: Step, folder: Path, until: float, total: float) -> Outcome:
    """Run a step within its limit and the time left; `total` is that of all steps, in seconds.

    Whatever goes wrong is its outcome, and the rest goes on.
    """
    limit = min(step.share * total, until - time.monotonic())
    late = limit < min(LEAST_SECONDS, step.share * total)
    why_not = step.why_not or ("No time left." if late else None)
    facts = {"title": step.title, "command": shown(step.command, folder)}
    if why_not:
        return Outcome(**facts, status="not run", body=why_not)
    minutes = f"{max(limit - SECONDS_TO_END, limit / 2) / 60:.2f}"
    command = [minutes if word == "MINUTES" else word for word in step.command]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    try:
        status = run_with_limit(command, environment | step.environment, folder / step.name, limit)
        seconds = time.monotonic() - started
        out, err = (
            (folder / f"{step.name}.{end}").read_text(errors="replace") for end in ("out", "err")
        )
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the report shows it)
        text = fenced("".join(traceback.format_exception(error)))
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        return Outcome(**facts, status=status, body=text)
    missing = [stem for stem in step.builds if not (ROOT / (stem + SUFFIX)).exists()]
    if status == "ok" and missing:
        status = f"failed: {', '.join(missing)} not built"
    if status == "ok" and step.must_print not in out:
        status = f"failed: nothing{step.must_print}"
    if step.shows_end:
        body = fenced(last_lines(out + err))
    else:
        body = fenced(out) + ("" if status == "ok" else f"\n\nErrors:\n\n{fenced(last_lines(err))}")
    body = body.replace(str(folder), "FOLDER").replace(f"{ROOT}/", "")
    return Outcome(**facts, status=status, body=body, times=f"{seconds:.0f} | {limit:.0f}")


def run_with_limit(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float
) -> str:
    """Run a command in the clone for at most `limit` seconds; its children end with it.

    Output goes to `log`.out and .err. Returns "ok", or what went wrong.
    """
    with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            err.write(f"{error}\n".encode())
            return f"failed: status {CANNOT_START}"
        try:
            status = process.wait(limit)
            return f"failed: status {status}" if status else "ok"
        except subprocess.TimeoutExpired:
            ending = "out of time"
        except KeyboardInterrupt:
            ending = "interrupted"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(KILL_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # what it has started may be left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return ending


def markdown(
    command: str, facts: Mapping[str, str], outcomes: Sequence[Outcome], waiting: Sequence[str]
) -> str:
    """The whole file; `waiting` are the titles of steps that were not reached yet."""
    lines = [f"# GPU tests and benchmarks, {facts['date'][:10]}", "", f"`{command}`", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    lines += ["", "| step | result | seconds | limit |", "|---|---|---|---|"]
    lines += [f"| {each.title} | {each.status} | {each.times} |" for each in outcomes]
    lines += [f"| {title} | not reached yet | | |" for title in waiting]
    for outcome in outcomes:
        lines += ["", f"## {outcome.title}", "", f"`{outcome.command}`", "", outcome.body]
    return "\n".join(lines) + "\n"


def machine_facts(device: str | None, commit: str | None) -> tuple[str, dict[str, str]]:
    """The device to use, "cuda" or "cpu", and a description of the machine and its software."""
    gpus = output_of("nvidia-smi", f"--query-gpu={GPU_FACTS}", "--format=csv,noheader")
    printed = output_of(sys.executable, "-c", ENVIRONMENT_PROGRAM)
    report, cuda = json.loads(printed.rpartition("; ")[2])
    machine, versions = report["machine"], report["versions"]
    device = device or ("cuda" if machine["gpus"] else "cpu")
    if not commit and report["commit"]:
        commit = report["commit"] + (", with changes" if report["uncommitted"] else "")
    versions_of = {each.name: each.version for each in distributions()}
    nvcc = find_nvcc()
    compiler = (output_of(nvcc, "--version") or "").rpartition("; ")[2] if nvcc else "no nvcc"
    return device, {
        "date": report["date"],
        "commit": commit or "unknown: not a git clone",
        "GPU": gpus or "none" if device == "cuda" else "not used",
        "CUDA": f"{cuda or 'none'} of torch; {compiler}",
        "processor": "{processor}, {cores} cores, {memory_gib} GiB".format(**machine),
        "Python": f"{versions['python']}, {versions['system']}",
        "packages": ", ".join(f"{name} {versions_of.get(name, MISSING)}" for name in PACKAGES),
        "load": f"{report['load']['before']:.1f} at the start",
    }


def output_of(*command: str) -> str | None:
    """The lines that a command prints, joined by "; "; None without the command or any output."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=FACT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer of {command[0]} in {FACT_SECONDS} s"
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def shown(command: Sequence[str], folder: Path) -> str:
    """A command as a person would type it."""
    text = shlex.join("python" if word == sys.executable else word for word in command)
    return text.replace(str(folder), "FOLDER")


def fenced(text: str) -> str:
    """Text as a block of Markdown, which it cannot end."""
    return "```\n" + text.strip("\n").replace("```", "'''") + "\n```"


def last_lines(text: str) -> str:
    """The end of an output."""
    return "\n".join(text.splitlines()[-OUTPUT_LINES:])


if __name__ == "__main__":
    sys.exit(main())
