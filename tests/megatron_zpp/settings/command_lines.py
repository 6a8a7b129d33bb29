"""Command lines: their configuration or error, with or without a JSON; flags without effect."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config
from zeropp.errors import InputError

IDLE = """
--no-masked-softmax-fusion
--no-bias-dropout-fusion
--no-gradient-accumulation-fusion
--use-mcore-models
--transformer-impl local
--transformer-impl transformer_engine
--no-query-key-layer-scaling
--attention-softmax-in-fp32
--use-flash-attn
--use-flash-attn-v2
--no-pipeline-parallel
--overlap-grad-reduce
--overlap-param-gather
--DDP-impl local
--DDP-impl torch
--use-cpu-initialization
--no-async-tensor-model-parallel-allreduce
--local_rank 3
--local-rank 3
--deepspeed
--zero-reduce-scatter
--zero-contigious-gradients
--zero-reduce-bucket-size 5000
--zero-allgather-bucket-size 5000
--partition-activations
--contigious-checkpointing
--checkpoint-in-cpu
--synchronize-each-layer
--profile-backward
--use-pin-memory
--distribute-saved-activations
--data-impl infer
--data-impl mmap
--mmap-warmup
--accumulate-allreduce-grads-in-fp32
--ckpt-format torch_dist
--num-dataset-builder-threads 2
--no-save-rng
--no-load-rng
--timing-log-level 1
--save-interval 5
--hysteresis 2
--loss-scale 8
--lr-wsd-decay-iters 3
--fp32-residual-connection
--keep-checkpoints 2
--save-retain-interval 6
--apply-wd-to-qk-layernorm
--async-save
--no-verify-checkpoint
--universal-checkpoint
--sequence-parallel
"""


def config_of(line: str, ranks: int = 1, file: Any = None, folder: Path | None = None) -> Config:
    """The configuration for a command line, with a JSON beside it if `file` is given."""
    words = shlex.split(line)
    if file is not None:
        path = folder / "ds.json"
        path.write_text(json.dumps(file))
        words += ["--deepspeed_config", str(path)]
    return parse(words, ranks)


def error_of(line: str, ranks: int = 1, file: Any = None, folder: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        config_of(line, ranks, file, folder)
    return str(caught.value)


def value_at(config: Any, path: str) -> Any:
    """The value at a path such as `model.num_layers`, tuples as lists."""
    for name in path.split("."):
        config = getattr(config, name)
    return list(config) if isinstance(config, tuple) else config
