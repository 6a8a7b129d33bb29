"""`megatron-zpp`: every command is listed, named in its help, and mistakes are explained."""

import pytest

import zeropp
from megatron_zpp.commands.__main__ import COMMANDS, main
from zeropp.ranks.launcher import main as launch

SOME_FLAGS = {
    "generate": ("--load", "--top-p", "--stop", "--tokenizer-type"),
    "evaluate": ("--load", "--stride"),
}


@pytest.fixture(autouse=True)
def process_ends_with_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that join ranks end their process."""

    def exit_process(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("os._exit", exit_process)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if COMMANDS[name].joins_ranks:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert not ended.value.code
    else:
        assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: megatron-zpp {name} ")
    assert all(flag in text for flag in SOME_FLAGS.get(name, ()))


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    with pytest.raises(SystemExit, match="0"):
        launch(["--version"])
    version = zeropp.__version__
    assert capsys.readouterr().out == f"megatron-zpp {version}\nzeropp {version}\n"


def test_the_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("name", "hint"), [("pretain", "did you mean pretrain?"), ("x", "expected one of pretrain, ")]
)
def test_an_unknown_command(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(f"error: unknown command {name}; {hint}")
