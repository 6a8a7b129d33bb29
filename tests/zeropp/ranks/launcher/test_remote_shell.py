"""What ssh says when a machine cannot be reached becomes one sentence that says what to do."""

import os
import re
from pathlib import Path

import pytest

from zeropp.errors import InputError
from zeropp.ranks.launcher.remote_shell import RemoteShell, is_here, remote_line

SAYS = '#!/bin/sh\necho "$@" > arguments\n[ "$1" = -G ] && { echo "hostname 192.0.2.7"; exit; }\n'


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of ssh, to be written; the current folder is its own."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ssh").touch(0o755)
    return tmp_path / "ssh"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "correct the name"),
        ("Warning: x\nroot@b: Permission denied (publickey).", "run `ssh-copy-id -p 2222 -i k b`"),
        ("Host key verification failed.", "run `ssh -p 2222 -i k b` once by hand"),
        ("ssh: connect to host b port 2222: Connection refused", "by --ssh_port"),
        ("ssh: connect to host b port 2222: Connection timed out", "is it on"),
        ("ssh: connect to host b port 2222: No route to host", "does a firewall let ssh pass"),
        ("kex_exchange_identification: banner", "try `ssh -p 2222 -i k b` by hand"),
        ("", "ssh says nothing; try"),
    ],
)
def test_each_failure_of_ssh_is_one_sentence(said: str, advice: str, ssh: Path) -> None:
    ssh.write_text(f"{SAYS}echo '{said}' >&2; exit 255")
    with pytest.raises(InputError) as error:
        RemoteShell(2222, ("-i", "k")).require_ready(["b"], "/", "/bin/sh", None)
    (line,) = str(error.value).splitlines()
    last = said.splitlines()[-1].rstrip(".") if said else ""
    assert line.startswith(f"b cannot be reached: {last}") and advice in line, line
    words = (ssh.parent / "arguments").read_text().split()
    assert words[:2] == ["-o", "BatchMode=yes"] and "-p 2222 -i k b test" in " ".join(words)


def test_all_machines_are_looked_at_and_what_they_lack_is_named(ssh: Path) -> None:
    ssh.write_text(f'{SAYS}for line; do :; done; echo "a banner"; exec sh -c "$line"')
    shell, here = RemoteShell(), str(ssh.parent)
    shell.require_ready(["a", "b"], here, "/bin/sh", "ssh")
    shell.require_ready(["a", "b"], here, "/bin/sh", None)
    for folder, python, script, missing in (
        ("/no/folder", "/bin/sh", "/bin/sh", "has no folder /no/folder:"),
        (here, "/no/python", "ssh", "has no Python at /no/python:"),
        (here, "/bin/sh", "train.py", f"has no script {here}/train.py:"),
    ):
        with pytest.raises(InputError) as error:
            shell.require_ready(["a", "b"], folder, python, script)
        first, second = str(error.value).splitlines()
        assert first.startswith(f"a {missing}") and second.strip().startswith(f"b {missing}")


def test_without_ssh_a_sentence_says_so(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/folder")
    with pytest.raises(InputError, match="no program ssh here: install OpenSSH's client"):
        RemoteShell().require_ready(["a"], "/", "/bin/sh", None)


def test_a_machines_address_is_the_one_that_ssh_uses(ssh: Path) -> None:
    ssh.write_text(SAYS)
    assert RemoteShell().address("alias") == "192.0.2.7"
    ssh.write_text(SAYS.replace("192.0.2.7", "no.invalid"))
    assert RemoteShell().address("alias") is None


def test_this_machine_needs_no_ssh() -> None:
    assert is_here("localhost") and is_here("127.0.0.1")
    assert not is_here("192.0.2.7") and not is_here("no.invalid") and not is_here("root@localhost")


def test_words_arrive_as_they_were_given(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    program = ["sh", "-c", 'printf "%s|" "$X" "$@" > "it\'s here"', "sh", "b c", "$d", '"']
    os.system(remote_line(str(folder), {"X": "two words; `true`"}, program))
    assert (folder / "it's here").read_text() == 'two words; `true`|b c|$d|"|'
    assert re.match(r"cd '.*' && exec /usr/bin/env ", remote_line(str(folder), {}, program))
