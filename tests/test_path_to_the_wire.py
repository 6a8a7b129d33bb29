"""How much of ours executes before a training run sends its first byte of weights."""

import json
import re

from tests.launched import TORCHRUN, launching, wait_for

# More only with a new capability whose settings have to be read.
FILES, FUNCTIONS = 95, 582
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 50 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 2 --lr 3e-3 --lr-warmup-iters 1 --num-workers 0 --eval-iters 0 "
    "--exit-signal-handler --save saved --load saved --tensorboard-dir curves"
)


def test_few_functions_of_few_files_run_before_the_first_gather(tmp_path):
    settings = {
        "zero_optimization": {
            "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 1,
            "zero_quantized_gradients": True,
        },
        "zeropp": {"ranks_per_node": 1},
    }  # fmt: skip
    (tmp_path / "zero.json").write_text(json.dumps(settings))
    flags = f"{RUN} --deepspeed_config zero.json"
    with launching(tmp_path) as launch:
        script = ["--nproc-per-node", "2", "-m", "tests.path_to_the_wire"]
        process, log = launch([*TORCHRUN, *script, *flags.split()])
        wait_for('"path": ', log, process)
        process.wait(timeout=60)
    (line,) = re.findall(r'^\{"functions".*', log.read_text(), re.M)
    counts = json.loads(line)
    assert counts["path"][-1].endswith("WeightGather.__call__")
    assert counts["files"] <= FILES and counts["functions"] <= FUNCTIONS, counts
