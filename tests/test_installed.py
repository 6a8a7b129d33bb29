"""What pip installs works without the clone: a wheel with compiled libraries, and one without.

The fresh environments borrow the packages of the running one by a .pth file, so nothing is
downloaded; this project itself is installed in them from a wheel.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from zeropp.native.library import SUFFIX

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
SOURCES = ("csrc", "megatron_zpp", "zeropp")
FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
LIBRARIES = ("zeropp/native/_cpu", "megatron_zpp/data/_index")
NO_COMPILER = {"CC": "false", "CXX": "false", "ZPP_BUILD_CUDA": "0"}
FAST_COMPILER = """#!/bin/sh
exec c++ "$@" -O0  # a quarter of the time; the last -O counts
"""
ONE_STEP = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--train-iters 1 --log-interval 1 --eval-iters 0 --lr 1e-3 --num-workers 0 --zero-stage 3 "
    "--data-path a_text_document --split 1 --tokenizer-type NullTokenizer --vocab-size 50257"
).split()
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
# Builds a sample index and makes a step of Adam; prints the libraries that were loaded for that.
# Then runs the command that is given.
USE_LIBRARIES = """
import os, sys
from pathlib import Path
import torch, zeropp
from megatron_zpp.commands.__main__ import main
assert main("dump-samples --seq-length 16 --data-path a_text_document --split 1 --show 1 "
            "--tokenizer-type NullTokenizer --vocab-size 50257".split()) == 0
weight = torch.nn.Parameter(torch.ones(8))
weight.grad = torch.ones(8)
zeropp.optim.CPUAdam([weight], lr=0.5, weight_decay=0.0).step()
assert abs(weight[0].item() - 0.5) < 1e-3
if os.environ.get("RANK", "0") == "0":
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    print("loaded:", *sorted(path for path in paths if "/_cpu." in path or "/_index." in path))
    print("installed in:", Path(zeropp.__file__).parents[1])
sys.exit(main(sys.argv[1:]))
"""
# In one process: what they have in common is imported once.
OTHER_LOOPS = """
import runpy, sys
for sys.argv in (["attach_fsdp2.py", "--steps", "2"],
                 ["gan.py", "--deepspeed_config", "gan.json", "--steps", "3"]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(command: Sequence[object], folder: Path, **variables: str) -> str:
    """What a command prints that must succeed, without this clone on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built in a copy of the clone without what was compiled there."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in SOURCES:
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run([sys.executable, "-c", code], folder)
    return next((folder / "dist").glob("*.tar.gz"))


@pytest.fixture(scope="module", params=["compiled", "without a compiler"])
def wheel(request: pytest.FixtureRequest, sdist: Path, tmp_path_factory) -> Path:
    """A wheel built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "c++"
    compiler.write_text(FAST_COMPILER)
    compiler.chmod(0o755)
    variables = {"CC": str(compiler), "CXX": str(compiler), "ZPP_BUILD_CUDA": "0"}
    if request.param == "without a compiler":
        variables = NO_COMPILER
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    run([sys.executable, "-m", "pip", "wheel", *options, sdist], folder, **variables)
    return next(folder.glob("*.whl"))


def is_compiled(wheel: Path) -> bool:
    """Whether the wheel holds both libraries; holding only one of them is an error."""
    names = zipfile.ZipFile(wheel).namelist()
    present = [library + SUFFIX in names for library in LIBRARIES]
    assert present[0] == present[1], names
    return present[0]


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(with_pip=False).create(folder)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    # Another installation of this project may be among what is borrowed: it must stay.
    options = ("--no-deps", "--no-index", "--ignore-installed", "--no-warn-script-location")
    run([folder / "bin" / "python", "-m", "pip", "install", *options, wheel], folder)
    return folder / "bin"


def test_the_source_distribution_is_complete(sdist: Path) -> None:
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    sources = {name for name in sources if "__pycache__" not in name}
    assert sources and sources <= names
    assert {"zeropp/py.typed", "megatron_zpp/py.typed", "setup.py", "LICENSE"} <= names
    assert not any(name.startswith("tests") or name.endswith(".so") for name in names)


def test_the_wheel_holds_what_it_should(wheel: Path, request: pytest.FixtureRequest) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"zeropp/py.typed", "megatron_zpp/py.typed"} <= names
    folders = {name.partition("/")[0] for name in names}
    assert {name.partition("-")[0] for name in folders} == {"zeropp", "megatron_zpp"}
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name)  # for every Python
    assert is_compiled(wheel) == ("without a compiler" not in request.node.callspec.id)
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
    assert "Requires-Dist: torch<2.15,>=2.11.0a0" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_it_works_in_an_empty_folder(wheel: Path, programs: Path, tmp_path: Path) -> None:
    assert run([programs / "megatron-zpp", "--help"], tmp_path).startswith("usage: megatron-zpp ")
    for path in DATA.glob("a_text_document.*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": QUANTIZED}))
    (tmp_path / "use_libraries.py").write_text(USE_LIBRARIES)
    command = [programs / "python", "-m", "use_libraries", "pretrain", *ONE_STEP]
    if not is_compiled(wheel):  # two ranks, which quantize what they exchange in plain PyTorch
        launcher = (programs / "zeropp", "--num_ranks", "2", "--module")
        command = [*launcher, *command[2:], "--deepspeed_config", "ds.json"]
    text = run(command, tmp_path)
    site_packages = next(programs.parent.glob("lib/python*/site-packages"))
    assert f"installed in: {site_packages}\n" in text
    loaded = re.search("^loaded:(.*)$", text, re.MULTILINE)[1].split()
    expected = sorted(LIBRARIES) if is_compiled(wheel) else []
    assert [path.removesuffix(SUFFIX) for path in loaded] == [
        str(site_packages / library) for library in expected
    ]
    assert re.search(r"iteration +1/ +1 .*lm loss: 1\.\d+E\+01 ", text), text
    assert ("INT8" in text) != is_compiled(wheel)


def test_other_trainers_and_loops_for_deepspeed_need_no_clone(
    wheel: Path, programs: Path, tmp_path: Path
) -> None:
    if not is_compiled(wheel):
        pytest.skip("the wheel with libraries shows it, faster")
    names = ("attach_fsdp2.py", "standard_library.py", "deepspeed/gan.py", "deepspeed/gan.json")
    for name in names:
        shutil.copy(ROOT / "examples" / name, tmp_path)
    text = run([programs / "python", "-c", OTHER_LOOPS], tmp_path)
    assert "step 1, loss" in text and "sent per step, gradients" in text
    assert re.search(r"distance \d", text)
