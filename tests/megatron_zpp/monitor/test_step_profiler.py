"""`--profile` writes a trace of the iterations asked for, with our collectives by name."""

import json
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from tests.megatron_zpp.train.training_runs import log_of, losses
from tests.ranks import ranks

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/ds_zeropp_two_nodes.json"


@ranks(4)
def test_the_trace_has_the_iterations_and_the_names(tmp_path):
    flags = f"--deepspeed_config {EXAMPLE} --train-iters 5 --tensorboard-dir {tmp_path} "
    flags += "--micro-batch-size 2 --global-batch-size 16 "  # two micro-batches
    plain = log_of(flags)
    flags += "--profile --profile-step-start 1 --profile-step-end 3 --profile-ranks 0 2 "
    log = log_of(flags)
    dist.barrier()
    folder = tmp_path / "profile"
    names = {f"rank{rank}.iterations-2-3.pt.trace.json" for rank in (0, 2)}
    assert {path.name for path in folder.iterdir()} == names
    assert losses(log) == losses(plain)
    for name in names:
        events = json.loads((folder / name).read_text())["traceEvents"]
        ours = Counter(e["name"] for e in events if str(e.get("name")).startswith("zeropp "))
        assert {
            "zeropp all_gather of weights_forward, 2 ranks across nodes",
            "zeropp all_gather of weights_forward, 2 ranks in a node",
            "zeropp all_gather of weights_backward, 2 ranks in a node",
            "zeropp all_to_all of gradients, 2 ranks in a node",
            "zeropp all_to_all of gradients, 2 ranks across nodes",
        } == {*ours}
        assert all(count % 2 == 0 for count in ours.values())  # of two iterations


@ranks(1)
def test_a_run_that_ends_earlier_has_its_iterations(tmp_path):
    log_of(f"--train-iters 4 --tensorboard-dir {tmp_path} --profile --profile-step-start 2 ")
    assert [path.name for path in (tmp_path / "profile").iterdir()] == [
        "rank0.iterations-3-4.pt.trace.json"
    ]
