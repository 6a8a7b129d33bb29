"""The program for machines with a GPU: its steps, its limits, and the Markdown it writes."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

from benchmarks.shared import gpu_run
from benchmarks.shared.gpu_run import Outcome, Step, outcome_of, run_with_limit, steps
from tests.launched import ROOT

SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]


def python(text: str, **more) -> Step:
    return Step(name="it", title="It", command=(sys.executable, "-c", text), share=1.0, **more)


def options(**flags) -> SimpleNamespace:
    return SimpleNamespace(**{"minutes": 8, "tiny": False} | flags)


def test_the_program_runs_from_any_folder_and_leaves_markdown(tmp_path: Path) -> None:
    report, kept = tmp_path / "report.md", tmp_path / "kept"
    flags = "--device cpu --tiny --minutes 20 --only memcheck kernels --commit abc123".split()
    command = [*SCRIPT, *flags, "--output", str(report), "--keep", str(kept)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr + report.read_text()
    text = report.read_text()
    for words in (
        "| commit | abc123 |",
        "| GPU | not used |",
        "packages | torch ",
        "| Kernels | ok |",
        "`python -m benchmarks.kernels.quantize_kernels --device cpu",
        "GB/s",
        "there is no GPU",
    ):
        assert words in text, words
    assert sys.executable not in text and "## Training" not in text
    assert (kept / "kernels.json").exists()


def test_a_step_that_fails_or_takes_too_long_says_so(tmp_path: Path, monkeypatch) -> None:
    def run(step: Step, seconds: float = 60, total: float = 60) -> Outcome:
        return outcome_of(step, tmp_path, time.monotonic() + seconds, total)

    fine = run(python("print('all', 'well', '\\n```')"))
    assert fine.status == "ok" and "all well" in fine.body and fine.body.count("```") == 2
    bad = run(python("print('half'); raise SystemExit('why')"))
    assert bad.status == "failed: status 1" and "half" in bad.body and "why" in bad.body
    assert run(python("import time; time.sleep(60)"), total=0.5).status == "out of time"
    over = run(python("pass"), seconds=-1)
    assert over.status == "not run" and over.body == "No time left."
    unbuilt = run(python("pass", builds=("zeropp/_nothing",)))
    assert unbuilt.status == "failed: zeropp/_nothing not built"
    assert (
        run(python("print('2 skipped')", must_print=" passed")).status == "failed: nothing passed"
    )
    warned = run(python("import sys; print('no GPU', file=sys.stderr)", shows_end=True))
    assert warned.status == "ok" and "no GPU" in warned.body
    skipped = run(python("pass", why_not="no reason"))
    assert skipped.status == "not run" and skipped.body == "no reason"
    monkeypatch.setattr(gpu_run, "run_with_limit", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in run(python("pass")).body


def test_all_that_a_command_started_ends_with_it(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    log = tmp_path / "log"
    assert run_with_limit([sys.executable, "-c", text], {}, log, 3.0) == "out of time"
    stat = Path(f"/proc/{int(log.with_suffix('.out').read_text())}/stat")
    until = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
    assert run_with_limit(["no-such-program"], {}, log, 5.0) == "failed: status 127"
    assert "no-such-program" in log.with_suffix(".err").read_text()


def test_an_interrupted_program_leaves_what_it_has(tmp_path: Path) -> None:
    """Ended by SIGTERM while a step runs; in the step only, pytest would sum up at its SIGINT."""
    report, tests = tmp_path / "report.md", tmp_path / "kept" / "tests.out"
    command = [*SCRIPT, "--device", "cpu", "--tiny", "--only", "tests", "memcheck"]
    command += ["--output", str(report), "--keep", str(tests.parent)]
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
    for folder, message in ((str(tmp_path), "from the wheel"), ("nowhere", "no wheels in nowhere")):
        command = [*SCRIPT, "--wheels", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and message in done.stderr


def test_the_tests_that_compute_sanitizer_watches_exist(tmp_path: Path) -> None:
    assert [step.name for step in steps("cuda", options(), tmp_path)] == list(gpu_run.STEPS)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *gpu_run.SANITIZED_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert f"{len(gpu_run.SANITIZED_TESTS)} tests" in done.stdout


def test_the_steps_know_whether_there_is_a_gpu(tmp_path: Path) -> None:
    plan = {step.name: step for step in steps("cpu", options(tiny=True), tmp_path)}
    assert plan["memcheck"].why_not == plan["racecheck"].why_not == "there is no GPU"
    assert plan["tests"].environment == {"CUDA_VISIBLE_DEVICES": ""}
    files = ("zeropp/quant/test_cuda", "megatron_zpp/train/test_cuda_training")
    assert all(f"tests/{path}.py" in plan["tests"].command for path in files)
    assert "tiny" in plan["train"].command and not plan["tests"].must_print
    flags = {"kernels_flags": "--rounds 3", "train_flags": "--micro-batch 8"}
    plan = {step.name: step for step in steps("cuda", options(**flags), tmp_path)}
    assert plan["kernels"].command[-2:] == ("--rounds", "3")
    assert plan["train"].command[-2:] == ("--micro-batch", "8")
    assert "tiny" not in plan["train"].command and plan["tests"].must_print == " passed"
    assert "hf" not in plan["train"].command and plan["build"].share * 8 * 60 == 40
    longer = {step.name: step for step in steps("cuda", options(minutes=14), tmp_path)}
    assert "hf" in longer["train"].command and longer["build"].share == plan["build"].share


def test_with_a_gpu_that_does_nothing_each_step_fails_and_the_report_names_it(
    tmp_path: Path,
) -> None:
    program, report = tmp_path / "nvidia-smi", tmp_path / "report.md"
    program.write_text("#!/bin/sh\necho NVIDIA Nothing, 1 MiB")
    program.chmod(0o755)
    command = [*SCRIPT, "--device", "cuda", "--output", str(report), "--only", "kernels", "train"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    text = report.read_text()
    assert done.returncode == 1 and "| GPU | NVIDIA Nothing, 1 MiB |" in text
    assert "| Kernels | failed: status 2 |" in text and "| Training | failed: status 2 |" in text
    assert "PyTorch sees no GPU" in text
