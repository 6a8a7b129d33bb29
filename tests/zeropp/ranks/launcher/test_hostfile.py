"""DeepSpeed's hostfile, --include and --exclude: which slots of which machines a job has."""

from pathlib import Path

import pytest

from zeropp.errors import InputError
from zeropp.ranks.launcher.hostfile import choose, first_slots, read_hostfile

HOSTS = {"a": [0, 1], "b": [0, 1], "c": [0, 1]}


def test_a_file_has_a_line_for_each_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\n\na slots=2\nuser@10.0.0.2   slots=1  # spare\n")
    assert read_hostfile(str(tmp_path / "hosts")) == {"a": [0, 1], "user@10.0.0.2": [0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n", "line 1: a: expected HOST slots=N, as in: worker-1 slots=8"),
        ("a slots=2\nb slots=0\n", "line 2: b slots=0: expected"),
        ("-oProxyCommand=x slots=1\n", "line 1: -oProxyCommand"),
        ("a slots=2\na slots=2\n", "line 2: a is there twice"),
        ("# nothing\n", "names no machine"),
        ("a\udcff slots=2\n", "hosts: it is not UTF-8 text; expected a file"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=message):
        read_hostfile(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        ("", "", HOSTS),
        ("c@a", "", {"a": [0, 1], "c": [0, 1]}),
        ("b:1,0@a:1", "", {"a": [1], "b": [0, 1]}),
        ("", "b", {"a": [0, 1], "c": [0, 1]}),
        ("", "b:0@a:0@c", {"a": [1], "b": [1]}),
    ],
)
def test_machines_are_chosen_as_deepspeed_does(include: str, exclude: str, chosen: dict) -> None:
    assert choose(HOSTS, include, exclude) == chosen
    assert list(choose(HOSTS, include, exclude)) == sorted(chosen)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "expected one of them"),
        ("d", "", "--include d: no machine 'd' among a, b, c"),
        ("", "a:7", "--exclude a:7: a has no slot 7; it has 2 slots, which count from 0"),
        ("a:x", "", "a has no slot x"),
        ("", "a@b@c", "no machine is left"),
    ],
)
def test_a_wrong_choice_is_explained(include: str, exclude: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose(HOSTS, include, exclude)


def test_the_first_machines_and_slots_are_taken() -> None:
    assert first_slots(HOSTS, 2, None) == {"a": [0, 1], "b": [0, 1]}
    assert first_slots(HOSTS | {"d": [0]}, None, 1) == dict.fromkeys("abcd", [0])
    with pytest.raises(InputError, match="--num_nodes 4: there are 3, a, b, c"):
        first_slots(HOSTS, 4, None)
    with pytest.raises(InputError, match="3 ranks on each machine, but a has 2 slots"):
        first_slots(HOSTS, None, 3)
    with pytest.raises(InputError, match="d has 1 slot and a 2 slots.*--num_gpus 1"):
        first_slots(HOSTS | {"d": [0]}, None, None)
