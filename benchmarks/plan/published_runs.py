"""Published runs that the planner can represent, predicted with the constants of its table.

These are FSDP in bf16, also with tensor parallelism, of models whose shapes are known. Nothing is
fitted here. A line rate that is not stated is taken to be
that of NVIDIA's DGX. Selective recomputation of operations, which is torchtitan's, is taken to
compute half of the layers twice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.plan.cells import CheckedSet, Prediction, read_cells
from benchmarks.plan.megatron_runs import is_megatron_run
from megatron_zpp.planner.candidates import given_candidate
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import Description, find_cluster
from megatron_zpp.settings.arguments import parse

Cell = dict[str, str]
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)


@dataclass(frozen=True)
class Shape:
    """A model's flags."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    groups: int
    vocabulary: int
    more: str = LLAMA


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "Llama 3.1 8B": Shape(32, 4096, 32, 14336, 8, 128256),
        "Llama 3 8B": Shape(32, 4096, 32, 14336, 8, 128256),
        "Llama 3.1 70B": Shape(80, 8192, 64, 28672, 8, 128256),
        "Llama 3.1 405B": Shape(126, 16384, 128, 53248, 8, 128256),
        "Llama 3 70B": Shape(80, 8192, 64, 28672, 8, 128256),
        "Llama 2 7b": Shape(32, 4096, 32, 11008, 32, 32000),
        "Llama 2 13B": Shape(40, 5120, 40, 13824, 40, 32000),
        "Llama 2 13b": Shape(40, 5120, 40, 13824, 40, 32000),
        "Llama 2 34b": Shape(48, 8192, 64, 22016, 8, 32000),
        "Llama 2 70B": Shape(80, 8192, 64, 28672, 8, 32000),
        "Llama 2 70b": Shape(80, 8192, 64, 28672, 8, 32000),
    }
)
GPUS = MappingProxyType(
    {
        "h100_96gb_hbm2e_500W": "h100",
        "h100_95gb_hbm2e_500W": "h100",
        "h100_80gb": "h100",
        "a100_80gb": "a100-80gb",
    }  # fmt: skip
)
DGX_LINKS = MappingProxyType({"h100": "3200gbit", "a100-80gb": "1600gbit"})
STATED_LINKS = MappingProxyType({"400 Gb/s per GPU": "3200gbit"})
SLOW_MEMORY = 2.4  # TB/s of the H100 with HBM2e


def check() -> CheckedSet:
    """Return predicted beside measured tokens per second and GPU."""
    predictions = []
    for cell in read_cells("public.tsv"):
        if why_not(cell) is None:
            predictions.append(_prediction(cell))
    return CheckedSet(
        name="published FSDP runs", constants="none fitted", predictions=tuple(predictions)
    )


def left_out() -> Counter[str]:
    """Return how many cells are not predicted here, by reason."""
    reasons = (why_not(cell) for cell in read_cells("public.tsv"))
    return Counter(reason for reason in reasons if reason is not None)


def why_not(cell: Cell) -> str | None:
    """Return why a cell is not predicted, or None."""
    if cell["source"].startswith("SDP4Bit"):
        return "checked as SDP4Bit"
    if "8" in cell["precision"].lower():
        return "FP8 products"
    if is_megatron_run(cell):
        return "checked as Megatron-LM"
    if any(cell[axis] not in ("1", "") for axis in ("pp", "cp")):
        return "pipeline or context parallelism, not stated in full"
    if "async" in cell["note"].lower():
        return "tensor parallelism beside products"
    if cell["model"] not in SHAPES:
        return "the shape of the model is not stated, or not a GPT"
    if not cell["tok_s_gpu"] or not cell["micro_batch"]:
        return "no rate or no micro-batch stated"
    return None


def _prediction(cell: Cell) -> Prediction:
    shape, gpus = SHAPES[cell["model"]], int(cell["gpus"])
    gpu = GPUS[cell["gpu"]]
    cluster = find_cluster(
        Description(
            gpu=gpu,
            num_nodes=gpus // int(cell["gpus_per_node"]),
            gpus_per_node=int(cell["gpus_per_node"]),
            link=STATED_LINKS.get(cell["link"], DGX_LINKS[gpu]),
            gpu_bandwidth=SLOW_MEMORY if "hbm2e" in cell["gpu"] else None,
        )
    )
    micro_batch, tensor_size = int(cell["micro_batch"]), int(cell["tp"] or 1)
    samples = micro_batch * gpus // tensor_size
    flags = (
        f"--num-layers {shape.layers} --hidden-size {shape.hidden} --seq-length {cell['seq']} "
        f"--num-attention-heads {shape.heads} --num-query-groups {shape.groups} "
        f"--ffn-hidden-size {shape.ffn} --bf16 --hidden-dropout 0 --attention-dropout 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {shape.vocabulary - 1} --zero-stage 3 "
        f"--micro-batch-size {micro_batch} --global-batch-size {samples} "
        f"{_sizes(tensor_size)} {shape.more}{_recomputation(cell, shape.layers)}"
    )
    config = parse(flags.split(), gpus)
    search = Search(config, shape.vocabulary, cluster)
    predicted = search.seconds(given_candidate(config))
    tokens = samples / gpus * int(cell["seq"])
    compiled = ", compiled" if cell["compile"] == "yes" else ""
    what = f"{cell['framework']}, {cell['model']}, {gpus} {cell['gpu']}"
    return Prediction(
        of=f"{what}, {cell['recompute']}{compiled}",
        quantity=f"tokens/s and GPU, {gpu}{' with TP' if tensor_size > 1 else ''}",
        predicted=tokens / predicted,
        measured=float(cell["tok_s_gpu"]),
        is_fitted=False,
    )


def _sizes(tensor_size: int) -> str:
    if tensor_size == 1:
        return ""
    return f"--tensor-model-parallel-size {tensor_size} --sequence-parallel"


def _recomputation(cell: Cell, layers: int) -> str:
    if cell["recompute"] in ("none", ""):
        return ""
    if cell["recompute"] == "full":
        return " --recompute-granularity full --recompute-method uniform"
    return (
        " --recompute-granularity full --recompute-method block "
        f"--recompute-num-layers {layers // 2}"
    )
