"""`megatron-zpp plan` as a user meets it: the answer, files, and what it says to mistakes."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from megatron_zpp.commands.plan import main, samples_per_replica

RUN = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --hidden-dropout 0 --attention-dropout 0 "
).split()
CLUSTER = "--cluster dgx-a100 --nodes 2 --link 1gbit --batch-tokens 4k".split()


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What one command prints, and the folder of the files that it writes."""
    folder = tmp_path_factory.mktemp("plan")
    files = ["--json", str(folder / "plan.json"), "--plot", str(folder / "plan.png")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*RUN, *CLUSTER, "--top", "3", *files]) == 0
    return printed.getvalue(), folder


def test_one_command_answers_in_tables_of_100_columns_and_a_picture(answer):
    text, folder = answer
    tables, _, _ = text.partition("places: ")
    assert "Where the time of a step goes" in tables and max(map(len, tables.splitlines())) <= 100
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    for words in (
        "2 nodes of 8 a100-80gb, 1 Gbit/s a node", "64 sequences, 4,096 tokens a step",
        "table only", "GiB a GPU", "HFU", "more: --top", "use stage", "flags: --micro-batch-size",
        "Local SGD: each replica", "Use local SGD, exchanged every", "arXiv:2503.09799",
        'JSON: {"zero_optimization"', "left out: oversubscribed",
    ):  # fmt: skip
        assert words in text, words


def test_json_holds_every_row_and_can_be_read_back_by_the_trainer(answer, capsys, tmp_path):
    _, folder = answer
    plan = json.loads((folder / "plan.json").read_text())
    assert len(plan["rows"]) > 3  # the number of them that are printed
    assert plan["cluster"]["link_gbit"] == 1 and plan["advice"].startswith("Use ")
    times = [row["step_s"] for row in plan["rows"] if row["place"] == 1]
    assert times == sorted(times)
    first, advised = plan["rows"][0], plan["rows"][plan["best"]]
    assert first["place"] == 1 and first["fastest_s"] <= first["step_s"] <= first["slowest_s"]
    assert advised["json"]["zeropp"] == {"sync_every": advised["interval"]}
    low, high = advised["loss_percent"]
    assert low < high and advised["loss_source"] and 3 * advised["step_s"] < first["step_s"]
    for best in (first, advised):
        file = tmp_path / "best.json"
        file.write_text(json.dumps(best["json"]))
        again = [*RUN, *CLUSTER, "--deepspeed-config", str(file)]
        again += [*best["flags"].split(), "--as-given", "--json", "-"]
        assert best["recomputed"] == "none" and main(again) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["step_s"] == pytest.approx(best["step_s"], rel=1e-12)
        assert row["memory_bytes"] == best["memory_bytes"] and row["key"] == best["key"]


def test_a_model_that_fits_nowhere_is_status_1(capsys):
    assert main([*RUN, *CLUSTER, "--gpu-memory", "1.6001"]) == 1
    streams = capsys.readouterr()
    assert "fits nowhere on 16 GPUs" in streams.err and "needs" in streams.out


def test_batch_tokens_become_samples_that_divide_into_micro_batches():
    assert [samples_per_replica(wanted) for wanted in (31.25, 1000, 0.2, 3.0, 1.33)] == [
        32, 1024, 1, 3, 1,
    ]  # fmt: skip


def test_nodes_that_come_and_go_are_planned_as_others(capsys, tmp_path):
    expected = []
    for more in ({}, {"sync_store": "10.0.0.1:29400", "sync_nodes": 2}):
        file = tmp_path / "steps.json"
        zeropp = {"sync_every": 30, **more}
        file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "zeropp": zeropp}))
        run = [*RUN, *CLUSTER, "--deepspeed_config", str(file), "--as-given", "--json", "-"]
        assert main(run) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        expected.append([row[key] for key in ("step_s", "memory_bytes", "sent_m", "key")])
    assert expected[0] == expected[1]
