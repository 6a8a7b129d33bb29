"""Writes what a run records for its report."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_zpp.monitor.report.run_record import RunFacts

MIB = 2**20
LENGTH = 10  # iterations of an interval
SENT = {"weights_forward": 1.0, "weights_backward": 0.0, "gradients": 0.5}  # MiB across nodes
PLAIN = {"weights_forward": 4.0, "weights_backward": 4.0, "gradients": 4.0}


def interval(number: int, **fields: object) -> dict[str, object]:
    """A log line of a run on two nodes: 2,000 tokens a step of half a second."""
    return {
        "iteration": LENGTH * number,
        "consumed_tokens": 2000 * LENGTH * number,
        "seconds_per_iteration": 0.5,
        "learning_rate": 0.001 * number,
        "lm_loss": 9.0 - number,
        "grad_norm": 2.0 / number,
        "memory_bytes": 300 * MIB,
        "peak_memory_bytes": 400 * MIB,
        "comm/across_nodes": sum(SENT.values()) * MIB,
        **{f"comm/{name}_across_nodes": value * MIB for name, value in SENT.items()},
        **{f"comm/plain_{name}_across_nodes": value * MIB for name, value in PLAIN.items()},
        **fields,
    }


def record(folder: Path, lines: Iterable[Mapping[str, object]], **facts: object) -> Path:
    """Write the files of a run of these log lines; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = {
        "command": ("pretrain_gpt.py", "--sample-prompt", "a word"),
        "train_iters": 40,
        "zero_stage": 3,
        "table": (
            ("model", "5,774,336 parameters\n2 layers, hidden 256"),
            ("nodes", "2 of 2 ranks"),
        ),
        "settings": {"zero": {"zero_optimization": {"stage": 3}}, "model": {"num_layers": 2}},
        "forecast": {"weights_forward_across_nodes": 1.25 * MIB, "gradients_across_nodes": MIB},
        "expected_step": {"fastest": 0.4, "typical": 0.45, "slowest": 0.6, "basis": "a table"},
        "sample": "def <script>alert(1)</script>(self):\n    return",
    }
    RunFacts(**{**known, **facts}).write(folder)
    return folder


def usual(folder: Path, **facts: object) -> Path:
    """Four intervals of a run, evaluated before the first and after the last."""
    held_out = [{"iteration": at, "validation_loss": loss} for at, loss in ((0, 9.5), (40, 5.25))]
    lines = [held_out[0], *map(interval, range(1, 5)), held_out[1]]
    return record(folder, lines, **facts)
