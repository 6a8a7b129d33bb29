"""A run ends with its report."""

from pathlib import Path

import torch.distributed as dist

from megatron_zpp.monitor.report.run_record import PLAIN, SENT, read_record
from tests.megatron_zpp.train.training_runs import log_of, with_json
from tests.ranks import ranks

FLAGS = "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr-decay-style constant "
FLAGS += with_json(
    {
        "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 1,
        "zero_quantized_gradients": True,
    },
    ranks_per_node=1,
)  # fmt: skip


@ranks(2, timeout=120)
def test_a_resumed_run_has_one_report_of_all_of_it(tmp_path: Path) -> None:
    curves = tmp_path / "curves"
    flags = f"{FLAGS} --tensorboard-dir {curves} --save {tmp_path}/save --load {tmp_path}/save "
    first = log_of(f"{flags} --exit-interval 2 --eval-iters 1 --eval-at-start")
    assert dist.get_rank() != 0 or f"  report             {curves}/report.html" in first
    assert dist.get_rank() != 0 or "2 of 4 iterations" in (curves / "report.html").read_text()
    second = log_of(f"{flags} --sample-prompt 7 --sample-length 3")
    if dist.get_rank() != 0:
        return
    assert f"  report             {curves}/report.html" in second
    record = read_record(curves)
    assert [point[0] for point in record.points("lm_loss")] == [1, 2, 3, 4]
    assert [point[0] for point in record.held_out_points()][0] == 0
    sent, forecast = record.mean_bytes(SENT), record.forecast_bytes()
    assert sent == forecast and sum(sent.values()) > 0  # each step gathers anew, nothing is coded
    assert list(record.mean_bytes(PLAIN)) == list(sent)
    assert all(sent[purpose] < plain for purpose, plain in record.mean_bytes(PLAIN).items())
    assert record.facts.sample in second.replace("\n  ", "\n")
    page = (curves / "report.html").read_text()
    assert "finished, 4 iterations" in page and "<svg" in page
    assert not any("Traceback" in log for log in (first, second))


@ranks(1, timeout=60)
def test_a_new_run_puts_the_report_of_the_earlier_one_aside(tmp_path: Path) -> None:
    flags = f"--micro-batch-size 1 --global-batch-size 2 --tensorboard-dir {tmp_path} "
    log_of(f"{flags} --train-iters 2")
    before = (tmp_path / "report.html").read_text()
    log_of(f"{flags} --train-iters 1 --log-interval 5")
    (earlier,) = tmp_path.glob("earlier-*")
    assert (earlier / "report.html").read_text() == before
    assert [read_record(earlier).iterations, (tmp_path / "report.html").exists()] == [2, False]
