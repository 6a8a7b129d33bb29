"""Published runs that the planner can represent, predicted with the constants of its table.

These are FSDP in bf16, also with tensor parallelism, of models whose shapes are known, and
Megatron-LM with tensor and pipeline parallelism. Nothing is fitted here. A line rate that is not
stated is taken to be that of NVIDIA's DGX. Selective recomputation of operations, which is
torchtitan's, is taken to compute half of the layers twice.

Megatron-LM's runs of 2022 on A100 wait for tensor parallelism, as ours do (Korthikanti et al.,
tables 3 and 5: heads, batches and interleaved stages). Those of its README send beside what they
compute, which the planner does not represent; their micro-batch is not published, and 1 is assumed.
"""

from collections import Counter
from types import MappingProxyType

from benchmarks.plan.cells import Cell, CheckedSet, Prediction, read_cells
from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import TERA, Cluster, find_cluster
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import Config

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
SHAPES = {row["model"]: row for row in read_cells("shapes.tsv")}
MEGATRON_RUNS = {row["params"]: row for row in read_cells("megatron.tsv")}  # what cells lack
README, PAPER = "images/model_table.png", "Korthikanti"
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
README_VOCABULARY, PAPER_VOCABULARY = 131072, 51200
COMMON = "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer"
SLOW_MEMORY = 2.4  # TB/s of the H100 with HBM2e


def check() -> list[CheckedSet]:
    """Return predicted beside measured: FSDP's tokens per second and GPU, and Megatron-LM's
    TFLOPs (README) and seconds (paper)."""
    cells = read_cells("public.tsv")
    fsdp = tuple(_fsdp_run(cell) for cell in cells if why_not(cell) is None)
    megatron = tuple(
        readme_run(cell) if README in cell["source"] else paper_run(cell)
        for cell in cells
        if is_megatron_run(cell)
    )
    return [
        CheckedSet("published FSDP runs", "none fitted", fsdp),
        CheckedSet("published runs of Megatron-LM", "none fitted", megatron),
    ]


def is_megatron_run(cell: Cell) -> bool:
    """Whether a cell is predicted here."""
    return README in cell["source"] or cell["source"].startswith(PAPER)


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


def _fsdp_run(cell: Cell) -> Prediction:
    shape, gpus = SHAPES[cell["model"]], int(cell["gpus"])
    vocabulary = int(shape["vocabulary"])
    gpu = GPUS[cell["gpu"]]
    cluster = find_cluster(
        gpu=gpu,
        num_nodes=gpus // int(cell["gpus_per_node"]),
        gpus_per_node=int(cell["gpus_per_node"]),
        link=STATED_LINKS.get(cell["link"], DGX_LINKS[gpu]),
        gpu_bandwidth=SLOW_MEMORY if "hbm2e" in cell["gpu"] else None,
    )
    micro_batch, tensor_size = int(cell["micro_batch"]), int(cell["tp"] or 1)
    samples = micro_batch * gpus // tensor_size
    split = f"--tensor-model-parallel-size {tensor_size} --sequence-parallel "
    flags = (
        f"--num-layers {shape['layers']} --hidden-size {shape['hidden']} "
        f"--seq-length {cell['seq']} --num-attention-heads {shape['heads']} "
        f"--num-query-groups {shape['groups']} --ffn-hidden-size {shape['ffn']} "
        f"--bf16 --zero-stage 3 --micro-batch-size {micro_batch} --global-batch-size {samples} "
        f"{split * (tensor_size > 1)}{LLAMA}{_recomputation(cell, int(shape['layers']))}"
        f"{' --compile' if cell['compile'] == 'yes' else ''}"
    )
    _, predicted = step_seconds(flags, gpus, vocabulary, cluster)
    tokens = samples / gpus * int(cell["seq"])
    compiled = ", compiled" if cell["compile"] == "yes" else ""
    what = f"{cell['framework']}, {cell['model']}, {gpus} {cell['gpu']}"
    return Prediction(
        f"{what}, {cell['recompute']}{compiled}",
        f"tokens/s and GPU, {gpu}{' with TP' if tensor_size > 1 else ''}",
        tokens / predicted,
        float(cell["tok_s_gpu"]),
    )


def step_seconds(
    flags: str, num_gpus: int, vocabulary: int, cluster: Cluster
) -> tuple[Config, float]:
    """Return the configuration that flags give, and the predicted seconds of a step."""
    config = parse(f"{flags} {COMMON} --vocab-size {vocabulary - 1}".split(), num_gpus)
    search = Search(config, vocabulary, cluster)
    return config, search.row(search.space.given).seconds


def _recomputation(cell: Cell, layers: int) -> str:
    if cell["recompute"] in ("none", ""):
        return ""
    if cell["recompute"] == "full":
        return " --recompute-granularity full --recompute-method uniform"
    return (
        " --recompute-granularity full --recompute-method block "
        f"--recompute-num-layers {layers // 2}"
    )


def readme_run(cell: Cell) -> Prediction:
    heads = MEGATRON_RUNS[cell["params"]]["heads"]
    flags = [
        f"--num-attention-heads {heads} --bf16 --micro-batch-size 1",
        f"--global-batch-size {cell['global_batch']}",
    ]
    if cell["tp"] != "1":
        flags.append("--sequence-parallel")
    config, seconds = _predict(cell, flags, README_VOCABULARY, "dgx-h100")
    tokens = config.batch.global_batch_size * config.model.seq_length
    flops = TokenFlops.of(config.model, config.recompute, README_VOCABULARY).model
    predicted = tokens * flops / seconds / int(cell["gpus"]) / TERA
    quantity = "TFLOPs, sending beside products"
    return Prediction(_name(cell), quantity, predicted, float(cell["tflops_gpu"]))


def paper_run(cell: Cell) -> Prediction:
    run = MEGATRON_RUNS[cell["params"]]
    flags = [
        f"--num-attention-heads {run['heads']} --fp16 --micro-batch-size {run['micro_batch']}",
        f"--global-batch-size {run['global_batch']}",
    ]
    if int(run["virtual_stages"]) > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {run['virtual_stages']}")
    if cell["recompute"] == "full":
        flags.append("--recompute-granularity full --recompute-method uniform")
    else:
        flags.append("--recompute-granularity selective --sequence-parallel")
    _, seconds = _predict(cell, flags, PAPER_VOCABULARY, "dgx-a100")
    of = f"{_name(cell)}, {cell['recompute']}"
    return Prediction(of, "step, s", seconds, float(cell["step_s"]))


def _predict(
    cell: Cell, flags: list[str], vocabulary: int, cluster_name: str
) -> tuple[Config, float]:
    num_gpus = int(cell["gpus"])
    sizes = (
        f"--num-layers {cell['layers']} --hidden-size {cell['hidden']} --seq-length {cell['seq']} "
        f"--tensor-model-parallel-size {cell['tp']} --pipeline-model-parallel-size {cell['pp']} "
        f"--zero-stage 1 {' '.join(flags)}"
    )
    nodes = num_gpus // int(cell["gpus_per_node"])
    cluster = find_cluster(cluster=cluster_name, num_nodes=nodes)
    return step_seconds(sizes, num_gpus, vocabulary, cluster)


def _name(cell: Cell) -> str:
    sizes = f"TP {cell['tp']}, PP {cell['pp']}"
    return f"{cell['framework']}, {cell['model']}, {cell['gpus']} {cell['gpu']}, {sizes}"
