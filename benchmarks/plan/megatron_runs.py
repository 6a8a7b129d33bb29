"""Published runs of Megatron-LM with tensor and pipeline parallelism; nothing is fitted.

Runs of 2022 on A100 wait for tensor parallelism, as ours do (Korthikanti et al., tables 3 and 5:
heads, batches and interleaved stages). Those of Megatron-LM's README send beside what they compute,
which the planner does not represent; their micro-batch is not published, and 1 is assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.plan.cells import CheckedSet, Prediction, read_cells
from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.planner.candidates import given_candidate
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import TERA, find_cluster
from megatron_zpp.planner.timing.hardware import Description as ClusterDescription
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config

Cell = dict[str, str]
README, PAPER = "images/model_table.png", "Korthikanti"
README_HEADS: Mapping[str, int] = MappingProxyType(
    {
        "1.7B": 16, "7.1B": 32, "16B": 48, "32B": 56, "70B": 64, "119B": 80, "177B": 96,
        "314B": 128, "462B": 144,
    }
)  # fmt: skip


@dataclass(frozen=True)
class PaperRun:
    """What table 3 of the paper has of a run, and the stages of each pipeline rank."""

    heads: int
    micro_batch: int
    global_batch: int
    virtual_stages: int


PAPER_RUNS: Mapping[str, PaperRun] = MappingProxyType(
    {
        "22B": PaperRun(64, 4, 4, 1),
        "175B": PaperRun(96, 1, 64, 3),
        "530B": PaperRun(128, 1, 280, 3),
        "1T": PaperRun(160, 1, 512, 1),
    }
)
README_VOCABULARY, PAPER_VOCABULARY = 131072, 51200
FORMAT = "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --zero-stage 1"


def is_megatron_run(cell: Cell) -> bool:
    """Whether a cell is predicted here."""
    return README in cell["source"] or cell["source"].startswith(PAPER)


def check() -> CheckedSet:
    """Return predicted beside measured TFLOPs of the README's runs and seconds of the paper's."""
    cells = [cell for cell in read_cells("public.tsv") if is_megatron_run(cell)]
    return CheckedSet(
        name="published runs of Megatron-LM",
        constants="none fitted",
        predictions=tuple(
            _readme_run(cell) if README in cell["source"] else _paper_run(cell) for cell in cells
        ),
    )


def _readme_run(cell: Cell) -> Prediction:
    flags = [
        f"--num-attention-heads {README_HEADS[cell['params']]} --bf16 --micro-batch-size 1",
        f"--vocab-size {README_VOCABULARY - 1} --global-batch-size {cell['global_batch']}",
    ]
    if cell["tp"] != "1":
        flags.append("--sequence-parallel")
    config, seconds = _predict(cell, flags, README_VOCABULARY, "dgx-h100")
    tokens = config.batch.global_batch_size * config.model.seq_length
    flops = TokenFlops.of(config.model, config.recompute, README_VOCABULARY).model
    return Prediction(
        of=_name(cell),
        quantity="TFLOPs, sending beside products",
        predicted=tokens * flops / seconds / int(cell["gpus"]) / TERA,
        measured=float(cell["tflops_gpu"]),
        is_fitted=False,
    )


def _paper_run(cell: Cell) -> Prediction:
    run = PAPER_RUNS[cell["params"]]
    flags = [
        f"--num-attention-heads {run.heads} --fp16 --micro-batch-size {run.micro_batch}",
        f"--vocab-size {PAPER_VOCABULARY - 1} --global-batch-size {run.global_batch}",
    ]
    if run.virtual_stages > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {run.virtual_stages}")
    if cell["recompute"] == "full":
        flags.append("--recompute-granularity full --recompute-method uniform")
    else:
        flags.append("--recompute-granularity selective --sequence-parallel")
    _, seconds = _predict(cell, flags, PAPER_VOCABULARY, "dgx-a100")
    return Prediction(
        of=f"{_name(cell)}, {cell['recompute']}",
        quantity="step, s",
        predicted=seconds,
        measured=float(cell["step_s"]),
        is_fitted=False,
    )


def _predict(
    cell: Cell, flags: list[str], vocabulary: int, cluster_name: str
) -> tuple[Config, float]:
    num_gpus = int(cell["gpus"])
    sizes = (
        f"--num-layers {cell['layers']} --hidden-size {cell['hidden']} --seq-length {cell['seq']} "
        f"--tensor-model-parallel-size {cell['tp']} --pipeline-model-parallel-size {cell['pp']}"
    )
    config = parse(" ".join([sizes, FORMAT, *flags]).split(), num_gpus)
    nodes = num_gpus // int(cell["gpus_per_node"])
    cluster = find_cluster(ClusterDescription(cluster=cluster_name, num_nodes=nodes))
    search = Search(config, vocabulary, cluster)
    return config, search.seconds(given_candidate(config))


def _name(cell: Cell) -> str:
    sizes = f"TP {cell['tp']}, PP {cell['pp']}"
    return f"{cell['framework']}, {cell['model']}, {cell['gpus']} {cell['gpu']}, {sizes}"
