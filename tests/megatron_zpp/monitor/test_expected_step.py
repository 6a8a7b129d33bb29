"""A run finds itself in the plan that was made with its flags; slow steps are reported once."""

import json
import random

import pytest
import torch.distributed as dist

from megatron_zpp.commands.plan import main
from megatron_zpp.monitor.expected_step import (
    ExpectedStep,
    StepWatch,
    read_expected_step,
)
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.train.training_runs import TINY, log_of
from tests.ranks import ranks
from zeropp.errors import InputError

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --global-batch-size 16 "
)
EXPECTED = ExpectedStep(fastest=0.5, typical=0.7, slowest=1.0, basis="")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    flags = f"{RUN} --cluster dgx-a100 --nodes 2 --link 1gbit --json {path}"
    assert main(flags.split()) == 0
    return path


def test_the_rows_of_a_plan_are_found_by_the_runs_they_stand_for(plan_file, tmp_path):
    plan = json.loads(plan_file.read_text())
    for row in plan["rows"][::5]:
        settings = tmp_path / "zero.json"
        settings.write_text(json.dumps(row["json"]))
        flags = f"{RUN} {row['flags']}"
        config = parse(f"{flags} --deepspeed-config {settings}".split(), 16)
        expected = read_expected_step(str(plan_file), config.step_key(16))
        assert expected.typical == row["step_s"]
        assert f"{row['step_s']:.3g} s a step expected" in str(expected)
        assert "table only" in str(expected)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--zero-stage 3", 8, "the nearest in it has ranks 16, micro_batch 1"),
        ("--zero-stage 3 --seq-length 64", 16, "has tokens 32"),
    ],
)
def test_another_run_is_told_what_differs(flags, ranks, message, plan_file):
    config = parse(f"{RUN} {flags}".split(), ranks)
    with pytest.raises(InputError, match=message):
        read_expected_step(str(plan_file), config.step_key(ranks))


@ranks(2)
def test_a_run_says_what_was_expected_and_warns_of_steps_that_take_longer(tmp_path):
    """What a plan expects of two H100 is less than two processes on a CPU need."""
    flags = "--global-batch-size 8 --micro-batch-size 2 --zero-stage 3 --train-iters 22 "
    path = tmp_path / f"plan-{dist.get_rank()}.json"
    planned = f"{TINY}{flags} --gpu h100 --gpus-per-node 2 --as-given --json {path}"
    assert main(planned.split()) == 0
    plan = json.loads(path.read_text())
    log = log_of(f"{flags} --plan-file {path}")
    if dist.get_rank() == 0:
        assert f"{plan['rows'][0]['step_s']:.3g} s a step expected" in log
        assert log.count("warning: a step takes") == 1
    plan["rows"][0] |= {"slowest_s": 1e6}
    path.write_text(json.dumps(plan))
    assert "warning: a step takes" not in log_of(f"{flags} --plan-file {path}")


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    config = parse(RUN.split(), 16)
    for text in ("{}", "no JSON", '{"cluster": {"basis": ""}, "rows": [1]}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InputError, match="expected what megatron-zpp plan writes"):
            read_expected_step(str(tmp_path / "x.json"), config.step_key(16))
    with pytest.raises(InputError, match="--plan-file"):
        read_expected_step(str(tmp_path / "absent.json"), config.step_key(16))


def reports(steps):
    watch = StepWatch(EXPECTED)
    return [line for line in map(watch.warning, steps) if line is not None]


def test_slow_steps_are_reported_once():
    (line,) = reports([2.0] * 100)
    assert line.startswith("warning: a step takes 2 s, the median of 15, ")
    assert "expected 0.5 to 1: look at the links" in line


def test_a_slow_warm_up_and_a_few_slow_steps_are_not_reported():
    draw = random.Random(0)
    steps = [9.0] * StepWatch.WARM_UP + [1.2] * 7 + [0.9] * 8
    rest = steps[StepWatch.WARM_UP :]
    draw.shuffle(rest)
    assert reports(steps[: StepWatch.WARM_UP] + rest) == []
    assert reports([9.0] * (StepWatch.LAST - 1)) == []
