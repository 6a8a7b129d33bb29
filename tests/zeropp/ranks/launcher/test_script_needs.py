"""What a script says to the launcher is read before torch is imported, or refused."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zeropp.ranks.launcher import main

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ZEROPP = ['x']", "expected a dict with the keys check and imports"),
        ("ZEROPP = {'checks': 'a:b'}", "expected a dict with the keys check and imports"),
        ("ZEROPP = {'check': 'no_module:f'}", "cannot be imported: No module named 'no_module'"),
        ("ZEROPP = {'check': 'json:no_function'}", "cannot be imported: .*no_function"),
    ],
)
def test_a_line_of_a_script_that_is_not_as_expected(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "script.py"
    script.write_text(line)
    assert main(["--num_ranks", "1", str(script)]) == 2
    assert re.match(rf"error: {script}: ZEROPP = .*{words}", capsys.readouterr().err)


MISTAKES = [
    (["{script}", "--data-path", "none"], "no dataset at none: expected none.idx"),
    (["{script}", "--num-layer", "2"], "unknown flag --num-layer"),
    (["{script}", "--deepspeed_config", "none"], "none: No such file"),
    (["{script}", "--save", "{script}/x"], "cannot be written (Not a directory)"),
    (["--module", "megatron_zpp.commands", "finetune"], "needs --pretrained-checkpoint"),
]


@pytest.mark.new_interpreter
def test_mistakes_are_said_before_torch_is_imported() -> None:
    script = str(ROOT / "pretrain_gpt.py")
    given = [[word.format(script=script) for word in words] for words, _ in MISTAKES]
    code = f"""import sys; from zeropp.ranks.launcher import main
for words in {given}:
    assert main(["--num_ranks", "4", *words]) == 2
assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    said = done.stderr.split("error: ")[1:]
    for (_, error), line in zip(MISTAKES, said, strict=True):
        assert error.format(script=script) in line
