"""The commands people type, on real ranks under real launchers; kills and signals included."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.launched import LAUNCH, ROOT, kill_all, launching, rank_pid, wait_for, zeropp
from tests.terminal import ESCAPE, Terminal

TUTORIAL = (
    "--num-layers 2 --hidden-size 64 --seq-length 64 --num-attention-heads 4 --batch-size 1 "
    f"--zero-stage 3 --deepspeed_config {ROOT}/examples/ds_zeropp_config.json "
    "--deepspeed-activation-checkpointing --fp16 --checkpoint-activations "
)
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --log-interval 1 "
    "--zero-stage 3 --eval-iters 0 --lr 1e-3 "
)
FOREVER = TINY + "--train-iters 1000000 "


@pytest.fixture
def launch(tmp_path):
    with launching(tmp_path) as run:
        yield run


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+) \|", text)]


def test_the_tutorials_command(launch):
    sizes = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    flags = TUTORIAL + sizes + "--train-iters 2 --eval-iters 1 --initial-loss-scale 1024 "
    flags += "--mock-data --tokenizer-type NullTokenizer --vocab-size 50"
    script = str(ROOT / "pretrain_zeropp_gpt.py")
    launcher = [*LAUNCH, "--num_ranks", "4", "--ranks_per_node", "2"]
    process, log = launch([*launcher, script, *flags.split(), "--log-interval", "1"])
    assert process.wait(200) == 0, log.read_text()
    text = log.read_text()
    assert len(losses(text)) == 2 and all(0 < loss < 20 for loss in losses(text))
    assert re.findall(r"number of skipped iterations: +(\d+)", text) == ["0"] * 2
    assert "using the 2 ranks of one node" in text and "INT8" in text
    crossed = re.findall(r"across nodes: (\S+) .* weights backward: (\S+) ", text)
    assert len(crossed) == 2
    assert all(float(total) > 0 == float(backward) for total, backward in crossed)


def test_a_terminal_gets_short_lines(tmp_path):
    terminal = Terminal(columns=80)
    command = [*LAUNCH, "--num_ranks", "2", "--ranks_per_node", "1", f"{ROOT}/pretrain_gpt.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    subprocess.run(
        [*command, *TINY.split(), *"--train-iters 3 --save saved --save-interval 2".split()],
        cwd=tmp_path, env=environment, stdout=terminal.stream, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    shown = re.split(r"[\r\n]+", ESCAPE.sub("", terminal.close()))
    assert not [line for line in shown if len(line) > 80]
    lines = [line for line in shown if line.startswith("step ")]
    form = r"step {}/3  loss \d\.\d{{3}}  lr +[\d.e-]+ +[\d.]+k? tok/s  [\d.]+ KiB between nodes"
    for number, line in enumerate(lines, start=1):
        assert re.match(form.format(number), line)
    assert len(lines) == 3 and not losses("\n".join(shown))
    assert any(line.startswith("━") and "3/3" in line for line in shown)


def test_a_killed_rank_is_named_and_the_others_end(launch):
    process, log = launch(zeropp(4, "pretrain_gpt.py", FOREVER))
    wait_for(" iteration        3/", log, process)
    os.kill(rank_pid(2, process), signal.SIGKILL)
    assert process.wait(60) != 0
    text = log.read_text()
    assert "rank 2 died" in text and "Traceback" not in text
    assert text.splitlines()[-1].startswith("zeropp: rank 2 was killed by SIGKILL")


def test_bad_flags_on_several_ranks_are_said_once(launch):
    process, log = launch(zeropp(2, "pretrain_gpt.py", TINY + "--no-such-flag"))
    assert process.wait(60) != 0
    text = log.read_text()
    assert text.count("error: ") == 1 and "--no-such-flag" in text
    assert "Traceback" not in text


def test_what_does_not_fit_the_ranks_is_said_once_before_anything_is_built(launch, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zeropp": {"ranks_per_node": 2}}))
    flags = f"{TINY} --deepspeed_config {tmp_path}/ds.json"
    process, log = launch(zeropp(3, "pretrain_gpt.py", flags))
    assert process.wait(120) != 0
    text = log.read_text()
    # A slow rank, ended by the launcher before it has come so far, passes it on as rank 0's.
    own = [line for line in text.splitlines() if "error: " in line and "error: rank 0:" not in line]
    assert len(own) == 1 and "Traceback" not in text, text
    assert "ranks_per_node = 2" in own[0] and "3 ranks" in own[0] and "parameters" not in text


def test_sigterm_saves_and_the_next_run_goes_on(launch, tmp_path):
    """The save is finished by the process that saves beside training."""
    flags = f"{FOREVER} --save {tmp_path}/save --load {tmp_path}/save --exit-signal-handler "
    flags += "--async-save"
    process, log = launch(zeropp(2, "pretrain_gpt.py", flags))
    wait_for(" iteration        3/", log, process)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    text = log.read_text()
    assert "a signal (--exit-signal-handler)" in text and "saved checkpoint" in text
    stopped_at = int(re.findall(r"stopping after iteration (\d+)", text)[-1])
    again, log = launch(zeropp(2, "pretrain_gpt.py", flags))
    wait_for(f" iteration {stopped_at + 2:8d}/", log, again)
    assert f"loaded checkpoint of iteration {stopped_at}" in log.read_text()


def test_power_cut_around_saves_then_every_restart_resumes(launch, tmp_path):
    flags = f"{FOREVER} --save {tmp_path}/save --load {tmp_path}/save --save-interval 2 "
    flags += "--keep-checkpoints 2"
    reached = 0
    for pause in (0.0, 0.2):
        process, log = launch(zeropp(2, "pretrain_gpt.py", flags))
        wait_for(f"saved checkpoint {tmp_path}/save/iter_{reached // 2 * 2 + 4:07d}", log, process)
        time.sleep(pause)
        kill_all(process)
        text = log.read_text()
        resumed = re.findall(r"loaded checkpoint of iteration (\d+)", text)
        assert [int(number) for number in resumed] == ([reached] if reached else [])
        saved = (tmp_path / "save/latest_checkpointed_iteration.txt").read_text()
        reached = int(saved)
        assert reached >= 4


def test_alone_without_a_launcher(tmp_path):
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *TINY.split(), "--train-iters", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 2 and not done.stderr


def test_make_pretrain_resumes_in_the_precision_of_its_first_start(tmp_path):
    """The choice is measured, so a busy machine could choose differently each time."""
    command = ["make", "-n", "-f", f"{ROOT}/Makefile", "-o", ".venv/.setup-done", "pretrain"]

    def printed() -> str:
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert "faster_precision.py" in printed()
    (tmp_path / "runs/pretrain").mkdir(parents=True)
    (tmp_path / "runs/pretrain/precision").write_text("--bf16\n")
    assert "faster_precision.py" not in printed()
