"""What `--help` prints."""

import re

import pytest

from megatron_zpp.settings.arguments import FLAGS, parse
from megatron_zpp.settings.run_help import FIRST, TOPICS
from zeropp.errors import InputError


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(["--num-layers", "x", "--help", *words], 1)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    return shown


def test_help_begins_with_twenty_flags_and_the_sections(capsys):
    shown = help_of(capsys)
    assert len(FIRST) == 20
    assert re.findall(r"^  --([a-z0-9-]+)", shown, re.M) == list(FIRST)
    assert all(f"\n  {name} " in shown for name in TOPICS)
    assert len(shown.splitlines()) <= 60


def test_help_all_lists_every_flag_with_a_readable_default(capsys):
    shown = help_of(capsys, "all")
    assert all(flag.shown in shown for flag in FLAGS)
    assert "write a trace (default 0)" in shown and "(default (" not in shown


def test_help_of_a_section_is_about_its_flags_alone(capsys):
    shown = help_of(capsys, "checkpoint", "--seed", "1")
    assert "--save-retain-interval" in shown and "--num-layers" not in shown
    assert "--transformer-impl" in help_of(capsys, "no-effect")
    with pytest.raises(InputError, match="--help checkpoints: did you mean checkpoint[?] expected"):
        parse(["--help", "checkpoints"], 1)
