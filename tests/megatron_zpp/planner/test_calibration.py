"""A log of a run gives back the constants with which its step is predicted as measured."""

import json
from dataclasses import replace

import pytest

from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.planner.calibration import calibrate_by_log, read_log
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import Range, find_cluster
from megatron_zpp.settings.arguments import parse
from zeropp.errors import InputError

FLAGS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 511 --zero-stage 3 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 4"
)
VOCABULARY, SEQUENCE = 512, 512
CLUSTER = find_cluster(cluster="dgx-a100", num_nodes=4, link="10gbit")
CONFIG = parse(FLAGS.split(), CLUSTER.num_ranks)
FLOPS = TokenFlops.of(CONFIG.model, CONFIG.recompute, VOCABULARY).performed


def write_log(path, seconds, num_ranks, flops=FLOPS, **changes):
    """Write a log of five intervals that took `seconds` a step, but for the first."""
    size = 4 * num_ranks
    rate = size * SEQUENCE / seconds / num_ranks
    line = {
        "iteration": 1, "global_batch_size": size, "seconds_per_iteration": seconds,
        "tokens_per_gpu_per_second": rate, "tflops": rate * flops / 1e12, **changes,
    }  # fmt: skip
    slow = {**line, "seconds_per_iteration": 10 * seconds}
    lines = [slow, *[line] * 4, {"iteration": 5, "validation_loss": 1.0}]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


def predicted(cluster, num_nodes):
    there = replace(cluster, num_nodes=num_nodes)
    batch = replace(CONFIG.batch, global_batch_size=4 * there.num_ranks)
    config = replace(CONFIG, batch=batch)
    search = Search(config, VOCABULARY, there)
    return search.row(search.space.given).seconds


def test_one_node_gives_the_rate_of_products_and_several_the_links(tmp_path):
    share, link = 0.37, 0.71
    truth = replace(
        CLUSTER, gpu=replace(CLUSTER.gpu, product_share=Range(share, share, share)),
        link_share=Range(link, link, link),
    )  # fmt: skip
    one = write_log(tmp_path / "one.jsonl", predicted(truth, 1), 8)
    after_one = calibrate_by_log(CLUSTER, CONFIG, VOCABULARY, one)
    assert after_one.gpu.product_share.typical == pytest.approx(share, rel=1e-6)
    assert after_one.link_share == CLUSTER.link_share
    assert after_one.basis.startswith("measured here: products at 37% of the peak on 8 GPUs")
    assert "of one node" in after_one.basis
    several = write_log(tmp_path / "two.jsonl", predicted(truth, 2), 16)
    after_both = calibrate_by_log(after_one, CONFIG, VOCABULARY, several)
    assert after_both.link_share.typical == pytest.approx(link, rel=1e-6)
    shares = after_both.link_share
    assert shares.slow <= 0.95 * link * 1.000001 and shares.fast >= 1.05 * link * 0.999999


def test_a_constant_at_its_physical_limit_says_so(tmp_path):
    impossible = write_log(tmp_path / "fast.jsonl", 1e-6, 8)
    after = calibrate_by_log(CLUSTER, CONFIG, VOCABULARY, impossible)
    assert after.gpu.product_share.typical == 0.95
    assert "AT ITS PHYSICAL LIMIT" in after.basis


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": 1.5 * FLOPS}, "give the flags of the run that was measured"),
        ({"num_ranks": 12}, "which does not go into nodes of 8 GPUs"),
        ({"tflops": 0.0}, "above 0"),
        ({"global_batch_size": "many"}, "expected the metrics.jsonl"),
    ],
)
def test_logs_that_do_not_fit_are_refused(changes, message, tmp_path):
    values = {"seconds": 0.5, "num_ranks": 8, **changes}
    path = write_log(tmp_path / "log.jsonl", **values)
    with pytest.raises(InputError, match=message):
        calibrate_by_log(CLUSTER, CONFIG, VOCABULARY, path)


def test_files_that_are_no_logs_are_refused(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        read_log(str(tmp_path / "none.jsonl"), SEQUENCE)
    for text in ("not JSON\n", "", '{"seconds_per_iteration": 1}\n' * 4):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(InputError, match="--calibrate"):
            read_log(str(tmp_path / "bad.jsonl"), SEQUENCE)
