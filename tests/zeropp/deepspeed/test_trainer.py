"""Hugging Face's Trainer with `deepspeed=`, where zeropp-deepspeed is installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import LAUNCH, ROOT, start

PACKAGE = ROOT / "packages" / "zeropp-deepspeed"
SECONDS = 300  # some 20 on an idle machine of 2 cores
IMPORT = "import deepspeed; print(deepspeed.__name__, deepspeed.__version__)"
TWIN = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the wheel of zeropp-deepspeed installs."""
    folder = tmp_path_factory.mktemp("installed")
    build = ["-q", "build", "--build-base", folder / "build", "--build-lib", folder / "lib"]
    subprocess.run([sys.executable, "setup.py", *build], cwd=PACKAGE, check=True, timeout=SECONDS)
    return folder / "lib"


def call(code: str, *folders: Path) -> subprocess.CompletedProcess:
    path = f"import sys; sys.path[:0] = {[str(folder) for folder in (*folders, ROOT)]}; "
    command = [sys.executable, "-c", path + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def test_the_distribution_is_zeropps_and_refuses_a_twin(installed, tmp_path):
    result = call(IMPORT, installed)
    assert result.stdout.startswith("zeropp.deepspeed 0.18.1+zeropp"), result.stderr
    twin = tmp_path / "deepspeed-0.18.0.dist-info"
    twin.mkdir()
    (twin / "METADATA").write_text(TWIN)
    result = call(IMPORT, installed, tmp_path)
    assert "DeepSpeed 0.18.0 and zeropp-deepspeed are installed in one environ" in result.stderr


@pytest.mark.new_interpreter  # accelerate looks for deepspeed when it is imported
def test_the_trainer_makes_an_update_per_accumulation_and_learns_as_without(installed, tmp_path):
    program = tmp_path / "program.py"
    run = ROOT / "tests/zeropp/deepspeed/trainer_run.py"
    lines = f"import sys, runpy; sys.path.insert(0, {str(installed)!r})\n"
    program.write_text(lines + f"runpy.run_path({str(run)!r}, run_name='__main__')\n")
    log = tmp_path / "log"
    command = [*LAUNCH, "--num_ranks", "2", str(program), str(tmp_path / "runs")]
    assert start(command, log, tmp_path).wait(timeout=SECONDS) == 0, log.read_text()
    last = next(line for line in log.read_text().splitlines() if line.startswith('{"plain, 1"'))
    results = json.loads(last)
    for accumulation in (1, 2, 4):
        plain, updates = results[f"plain, {accumulation}"]
        for stage in (2, 3):
            losses, made = results[f"stage {stage}, {accumulation}"]
            assert made == updates == len(losses)
            assert losses == pytest.approx(plain, rel=1e-6)
    assert results["resumed"] == results["whole"]
    plain = results["from the saved weights, plain"]
    assert results["from the saved weights, stage 3"] == pytest.approx(plain, rel=1e-6)
