"""The scripts at the root and in tools/ call the commands, and their help names the script."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOT_SCRIPTS = ("pretrain_gpt.py", "pretrain_zeropp_gpt.py", "finetune_gpt.py")
TOOLS = (
    "consolidate", "convert_hf", "dump_samples", "evaluate", "fetch_model", "generate",
    "inspect_dataset", "merge_datasets", "plan", "preprocess_data", "report",
)  # fmt: skip
NO_COMMANDS = {"faster_precision", "make_environment", "plot_schedules"}


def run_here(script: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a script in this process and return its exit status."""

    def exit_process(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("os._exit", exit_process)
    monkeypatch.setattr(sys, "argv", [str(script), *argv])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code or 0


@pytest.mark.parametrize("name", ROOT_SCRIPTS)
def test_help_names_the_script(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(ROOT / name, ["--help"], monkeypatch) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^usage: .*\b{name}\b", text) and "--num-layers" in text
    others = set(ROOT_SCRIPTS) - {name}
    assert not any(re.search(rf"(?<!\w){other}", text.split("\n\n")[0]) for other in others)


@pytest.mark.parametrize("name", TOOLS)
def test_help_names_the_tool(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(ROOT / "tools" / f"{name}.py", ["--help"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith(f"usage: python tools/{name}.py ")


def test_without_a_set_up_scripts_say_what_to_type() -> None:
    scripts = [*ROOT.glob("tools/*.py"), *(ROOT / name for name in ROOT_SCRIPTS)]
    for script in scripts:
        command = [sys.executable, "-S", "-E", str(script), "--help"]  # it sees no packages
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
        needs_it = script.stem != "make_environment"
        assert ("type `make setup`" in done.stderr) == needs_it, script
        assert "Traceback" not in done.stderr, done.stderr


def test_every_tool_is_tested_here() -> None:
    names = {path.stem for path in (ROOT / "tools").glob("*.py")}
    assert names == {*TOOLS, *NO_COMMANDS}


def test_finetuning_asks_for_the_model_to_start_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()
    assert run_here(ROOT / "finetune_gpt.py", argv, monkeypatch) == 2
    captured = capsys.readouterr()
    message = "error: finetune_gpt.py needs --pretrained-checkpoint FOLDER"
    assert message in captured.out + captured.err
