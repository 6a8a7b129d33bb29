"""The program for machines with a GPU: its steps, its limits, and the Markdown it writes."""

import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from benchmarks.shared import gpu_run
from benchmarks.shared.gpu_report import (
    Outcome,
    describe_build,
    describe_output,
    describe_tests,
    machine_facts,
    markdown,
)
from benchmarks.shared.gpu_run import Step, outcome_of, run_step, steps
from benchmarks.shared.time_limited_command import CommandResult
from tests.launched import ROOT

TESTS = """
import pytest
def test_one(): pass
def test_two(): assert 3 == 4, "it is 3"
@pytest.mark.skip(reason="no GPU")
@pytest.mark.parametrize("number", [1, 2])
def test_three(number): pass
"""


def python(text: str, **more) -> Step:
    return Step(name="it", title="It", command=(sys.executable, "-c", text), share=1.0, **more)


def options(**flags) -> SimpleNamespace:
    return SimpleNamespace(**{"tiny": False, "kernels_flags": "", "train_flags": ""} | flags)


def test_the_script_starts_the_program_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--minutes" in done.stdout, done.stderr


def test_the_program_runs_and_leaves_markdown(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "benchmarks.shared.gpu_run", "--device", "cpu", "--tiny"]
    command += ["--minutes", "20", "--only", "memcheck", "kernels", "--output", str(report)]
    done = subprocess.run(
        [*command, "--commit", "abc123", "--keep", str(tmp_path / "kept")],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + report.read_text()
    text = report.read_text()
    for words in (
        "| commit | abc123 |",
        "| GPU | not used |",
        "packages | torch ",
        "| Kernels | ok |",
        "## Kernels",
        "`python -m benchmarks.kernels.quantize_kernels --device cpu",
        "GB/s",
        "there is no GPU",
    ):
        assert words in text, words
    assert sys.executable not in text and "## Training" not in text
    assert (tmp_path / "kept" / "kernels.json").exists()


def test_a_step_that_fails_or_takes_too_long_says_so(tmp_path: Path) -> None:
    until = time.monotonic() + 60
    fine = run_step(python("print('all', 'well')"), tmp_path, until, 60.0)
    assert fine.status == "ok" and "all well" in fine.body
    bad = run_step(python("print('half'); raise SystemExit('why')"), tmp_path, until, 60.0)
    assert bad.status == "failed" and "status 1" in bad.body
    assert "half" in bad.body and "why" in bad.body
    late = run_step(python("import time; time.sleep(60)"), tmp_path, until, 0.5)
    assert late.status == "out of time" and 0.5 <= late.seconds < 20
    over = run_step(python("pass"), tmp_path, time.monotonic() - 1, 60.0)
    assert over.status == "not run" and over.body == "No time left."
    unbuilt = run_step(python("pass", builds=("zeropp/_nothing",)), tmp_path, until, 60.0)
    assert unbuilt.status == "failed: zeropp/_nothing not built"
    skipped = run_step(python("pass", why_not="no reason"), tmp_path, until, 60.0)
    assert skipped.status == "not run" and skipped.body == "no reason"
    broken = python("pass", describe=lambda result: 1 / 0)
    undescribed = outcome_of(broken, tmp_path, until, 60.0)
    assert undescribed.status == "failed" and "ZeroDivisionError" in undescribed.body


def test_an_interrupted_program_leaves_what_it_has(tmp_path: Path) -> None:
    """Ended by SIGTERM while a step runs; in the step only, pytest would sum up at its SIGINT."""
    report, tests = tmp_path / "report.md", tmp_path / "kept" / "tests.out"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny"]
    command += ["--only", "tests", "memcheck", "--output", str(report), "--keep", str(tests.parent)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("tests: python -m pytest")
    while not tests.exists():
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert "| Tests | interrupted |" in report.read_text()
    assert "| compute-sanitizer, memcheck | not reached yet |" in report.read_text()


def test_missing_packages_come_from_wheels(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "needed-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("needed.py", "raise SystemExit('from the wheel')")
        wheel.writestr("torch.py", "import needed")
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--wheels"]
    done = subprocess.run([*script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "from the wheel" in done.stderr
    done = subprocess.run([*script, "nowhere"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "no wheels in nowhere" in done.stderr


def test_tests_are_counted_with_their_reasons(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rsfE", str(path))

    def run(*flags: str) -> Outcome:
        step = Step(
            name="tests", title="Tests", command=(*command, *flags), share=1.0,
            describe=partial(describe_tests, True),
        )  # fmt: skip
        return run_step(step, tmp_path, time.monotonic() + 60, 60.0)

    both = run()
    assert both.status == "failed" and "1 failed, 1 passed, 2 skipped" in both.body
    assert "[2]" in both.body and "no GPU" in both.body and "it is 3" in both.body
    assert run("-k", "one").status == "ok"
    assert run("-k", "three").status == "all skipped"
    assert run("--no-such-flag").status == "failed"
    skipped = CommandResult(status=0, seconds=1.0, out="2 skipped in 0.1s", err="")
    assert describe_tests(False, skipped)[1] is None


def test_a_report_says_what_was_not_reached() -> None:
    outcome = Outcome(
        title="Build", command="make it", status="ok", body="done", seconds=3.2, limit=60.0
    )
    facts = {"date": "2026-01-02T03:04:05"}
    text = markdown("python benchmarks/gpu.py", facts, [outcome], ["Tests"])
    assert text.startswith("# GPU tests and benchmarks, 2026-01-02\n")
    assert "| Build | ok | 3 | 60 |" in text and "| Tests | not reached yet | | |" in text


def test_an_output_cannot_end_its_own_block() -> None:
    text, verdict = describe_output(CommandResult(status=0, seconds=1.0, out="a\n```\nb", err=""))
    assert text.count("```") == 2 and verdict is None


def test_a_build_that_only_warns_is_shown() -> None:
    warned = 'building extension "zeropp.native._cuda" failed: no such GPU'
    fine = CommandResult(status=0, seconds=1.0, out="g++ -c a.cpp", err="")
    assert describe_build(fine)[0] == "It was built."
    assert warned in describe_build(replace(fine, err=warned))[0]


def test_the_tests_that_compute_sanitizer_watches_exist(tmp_path: Path) -> None:
    assert [step.name for step in steps("cuda", options(), tmp_path)] == [
        "build", "tests", "kernels", "train", "memcheck", "racecheck",
    ]  # fmt: skip
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *gpu_run.SANITIZED_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert f"{len(gpu_run.SANITIZED_TESTS)} tests" in done.stdout


def test_the_steps_of_a_machine_without_a_gpu_know_it(tmp_path: Path) -> None:
    plan = {step.name: step for step in steps("cpu", options(tiny=True), tmp_path)}
    assert plan["memcheck"].why_not == plan["racecheck"].why_not == "there is no GPU"
    assert plan["tests"].environment == {"CUDA_VISIBLE_DEVICES": ""}
    for path in (
        "zeropp/quant/test_cuda",
        "zeropp/optim/test_cuda_adam",
        "zeropp/wire/test_cuda_ranks",
        "megatron_zpp/train/test_cuda_training",
    ):
        assert f"tests/{path}.py" in plan["tests"].command  # fmt: skip
    assert "tiny" in plan["train"].command
    flags = {"kernels_flags": "--rounds 3", "train_flags": "--micro-batch 8"}
    plan = {step.name: step for step in steps("cuda", options(**flags), tmp_path)}
    assert plan["kernels"].command[-2:] == ("--rounds", "3")
    assert plan["train"].command[-2:] == ("--micro-batch", "8")
    assert "tiny" not in plan["train"].command


def test_the_facts_name_the_commit_or_that_it_is_unknown() -> None:
    device, facts = machine_facts("cpu", None)
    assert device == "cpu" and facts["commit"]
    assert {"GPU", "driver", "CUDA", "packages", "Python"} <= set(facts)
