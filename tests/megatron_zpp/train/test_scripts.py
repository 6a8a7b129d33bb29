"""Command lines as the tutorials and Megatron-DeepSpeed's example scripts print them."""

import json
import logging
from pathlib import Path

from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.scheduled_values import Schedules
from tests.megatron_zpp.settings.command_lines import config_of, error_of

ROOT = Path(__file__).resolve().parents[3]
ZERO_PP_TUTORIAL = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 40 --hidden-size 6144
--seq-length 512 --num-attention-heads 32 --batch-size 1 --zero-stage 3
--deepspeed_config ds_zeropp_config.json --deepspeed-activation-checkpointing --fp16
--checkpoint-activations
"""
OFFLOAD_TUTORIAL = """
--model-parallel-size 1 --num-layers 50 --hidden-size 4096 --num-attention-heads 32 --batch-size 10
--deepspeed_config ds_zero_offload.config --checkpoint-activations
"""


def test_a_script_of_megatron_deepspeed(tmp_path, caplog):
    """Flags and JSON as its GPT-3 examples combine them."""
    caplog.set_level(logging.INFO, "megatron_zpp")
    file = {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {
            "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
            "min_loss_scale": 1, "initial_scale_power": 11,
        },
        "bf16": {"enabled": False},
        "wall_clock_breakdown": False,
    }  # fmt: skip
    config = config_of(
        "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.014 "
        "--tensor-model-parallel-size 1 --lr-decay-tokens 300000000000 --lr-warmup-tokens 37500000 "
        "--micro-batch-size 4 --exit-duration-in-mins 30000000 --global-batch-size 256 "
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 "
        "--max-position-embeddings 2048 --train-tokens 300000000000 --train-samples 439453125 "
        "--lr 6.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 949,50,1 --log-interval 10 "
        "--eval-interval 100 --eval-iters 10 --save-interval 10000 --weight-decay 0.1 "
        "--clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --load c --save c "
        "--tensorboard-queue-size 1 --log-timers-to-tensorboard --log-batch-size-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --tensorboard-dir t --checkpoint-activations "
        "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-path d --data-impl mmap "
        "--deepspeed --zero-stage 1 --pipeline-model-parallel-size 1 --no-pipeline-parallel "
        "--deepspeed-activation-checkpointing",
        8,
        file,
        tmp_path,
    )
    length = Schedules.of(config).length
    assert length.iterations == 300_000_000_000 // 2048 // 256
    assert config.precision.initial_loss_scale == 2048 and config.precision.loss_scale_window == 500
    assert config.zero.gradient_accumulation_steps == 8
    assert "by default" not in caplog.text


def test_the_zeropp_tutorial_runs_as_printed(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    config = parse(ZERO_PP_TUTORIAL.split(), 4)
    assert config.model.num_layers == 40 and config.model.num_positions == 512
    assert config.precision.fp16 and config.zero.fp16.enabled and config.zero.stage == 3
    assert config.recompute.recompute_granularity == "full"
    zero = config.zero.zero_optimization
    assert zero.zero_quantized_weights and zero.zero_quantized_gradients
    assert zero.zero_hpz_partition_size == 16


def test_the_offload_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("ds_zero_offload.config")
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    config = parse(OFFLOAD_TUTORIAL.split(), 2)
    assert config.batch.micro_batch_size == 10 and config.recompute.recompute_method == "uniform"
    path.write_text('{"zero_optimization": {\n  "offload_optimizer": {"device": "cpu",}\n "x": 1}}')
    assert "line 2, column 40" in error_of(OFFLOAD_TUTORIAL, 2)


def test_the_example_under_fp16():
    config = config_of(
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 2 "
        "--hidden-size 64 --seq-length 64 --num-attention-heads 4 --batch-size 1 --zero-stage 3 "
        f"--deepspeed_config {ROOT}/examples/ds_zero3.json --deepspeed-activation-checkpointing "
        "--fp16 --checkpoint-activations --train-iters 5 --log-interval 1 "
        "--initial-loss-scale 65536",
        4,
    )
    assert config.zero.stage == 3 and config.precision.initial_loss_scale == 65536
    assert config.batch.global_batch_size == 4 and config.zero.train_batch_size == 4
