"""The examples in Python learn: DeepSpeed's loop, and a Hugging Face model under all of ZeRO++."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.launched import LAUNCH, ROOT, start, zeropp

EXAMPLES = ROOT / "examples"
SECONDS = 300  # some 15 on an idle machine of 2 cores
PROGRAM = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_zpp"]:
    del sys.modules[name]
sys.modules["megatron_zpp"] = None  # to import it is an error
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, "--steps", "10"]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_the_engines_loop_learns_saves_and_goes_on(tmp_path):
    flags = f"--deepspeed_config {EXAMPLES}/ds_train_engine.json --save {tmp_path}/save --steps"
    losses = {}
    for steps in (10, 20):
        command = zeropp(2, "examples/train_engine.py", f"{flags} {steps}")
        process = start(command, tmp_path / "log", tmp_path)
        assert process.wait(timeout=SECONDS) == 0, (tmp_path / "log").read_text()
        log = (tmp_path / "log").read_text()
        steps_and_losses = re.findall(r"^step (\d+), loss ([\d.]+)", log, re.M)
        assert [int(step) for step, _ in steps_and_losses] == [steps]
        losses |= {int(step): float(loss) for step, loss in steps_and_losses}
    assert losses[20] < losses[10] and losses[20] < 4.0  # ln 256 = 5.5 is chance
    saved = {path.name for path in (tmp_path / "save").iterdir()}
    checkpoints = {"global_step10", "global_step20", "latest", "zero_to_fp32.py"}
    assert saved == checkpoints | {"pytorch_model.bin"}


def sent_by(script: Path, folder: Path) -> str:
    """Run ten steps on two nodes of two ranks, which must learn; return what is said of bytes."""
    log = folder / "log"
    launch = [*LAUNCH, "--num_ranks", "4", "--ranks_per_node", "2", str(script), "--steps", "10"]
    assert start(launch, log, folder).wait(timeout=SECONDS) == 0, log.read_text()
    losses = [
        float(loss) for loss in re.findall(r"^step \d+, loss ([\d.]+)", log.read_text(), re.M)
    ]
    assert len(losses) == 2 and losses[0] > 5 > 4.5 > losses[1]  # ln 256 = 5.5 is chance
    return log.read_text()


def test_gpt2_learns_with_all_three_on_without_megatron_zpp(tmp_path):
    zero = json.loads((EXAMPLES / "ds_hugging_face.json").read_text())["zero_optimization"]
    assert zero["zero_quantized_weights"] and zero["zero_quantized_gradients"]
    assert zero["zero_hpz_partition_size"] == 2 and zero["stage"] == 3
    script = str(EXAMPLES / "shard_hugging_face.py")
    (tmp_path / "program.py").write_text(PROGRAM.format(folder=str(EXAMPLES), script=script))
    text = sent_by(tmp_path / "program.py", tmp_path)
    sent = dict(re.findall(r"sent per step, (\w+, \w+): ([\d.]+) KiB", text))
    # Backward finds the weights that forward left in the node: they do not cross nodes again.
    assert float(sent["weights_forward, across_nodes"]) > 0
    assert float(sent.get("weights_backward, across_nodes", "0")) == 0


def test_llama_learns_split_within_nodes_and_sharded_across(tmp_path):
    text = sent_by(EXAMPLES / "tensor_parallel_hugging_face.py", tmp_path)
    sent = dict(re.findall(r"sent per step, (\w+, \w+): ([\d.]+) KiB", text))
    kinds = {kind for kind, num_bytes in sent.items() if float(num_bytes) > 0}
    assert kinds == {"weights_forward, across_nodes", "gradients, across_nodes"}


def test_llama_learns_under_fsdp2_and_sends_less_than_that(tmp_path):
    text = sent_by(EXAMPLES / "attach_fsdp2.py", tmp_path)
    sent = re.findall(r"sent per step, \w+, \w+: ([\d.]+) KiB instead of ([\d.]+)", text)
    ours, plain = (sum(map(float, column)) for column in zip(*sent, strict=True))
    assert 0 < 2 * ours < plain


def test_docstrings_become_examples_to_fine_tune_on(tmp_path):
    target = tmp_path / "folder" / "docstrings.jsonl"
    command = [sys.executable, str(EXAMPLES / "docstrings.py"), str(target)]
    subprocess.run(command, check=True, timeout=SECONDS)
    examples = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(examples) > 1000
    assert all(set(example) == {"prompt", "answer"} for example in examples)
    assert len({example["prompt"] for example in examples}) == len(examples)
    long = [example for example in examples if len(example["answer"]) > 200]
    assert long and not any(example["answer"] in example["prompt"] for example in long)
