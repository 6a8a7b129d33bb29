"""Hugging Face's Trainer with `deepspeed=`, where zeropp-deepspeed is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import ROOT

PACKAGE = ROOT / "packages" / "zeropp-deepspeed"
SECONDS = 300  # some 20 on an idle machine of 2 cores
IMPORT = (
    "import deepspeed, deepspeed.moe.utils, deepspeed.runtime.zero.partition_parameters; "
    "print(deepspeed.__name__, deepspeed.__version__)"
)
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
    program = ROOT / "tests/zeropp/deepspeed/trainer_run.py"
    path = os.pathsep.join([str(installed), str(ROOT)])
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True,
        timeout=SECONDS, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    last = next(line for line in result.stdout.splitlines() if line.startswith('{"plain, 1"'))
    results = json.loads(last)
    for accumulation in (1, 4):
        plain, updates = results[f"plain, {accumulation}"]
        for stage in (2, 3):
            losses, made = results[f"stage {stage}, {accumulation}"]
            assert made == updates == len(losses)
            assert losses == pytest.approx(plain, rel=1e-6)
    assert results["resumed"] == results["whole"]
    plain = results["from the saved weights, plain"]
    assert results["from the saved weights, stage 3"] == pytest.approx(plain, rel=1e-6)
