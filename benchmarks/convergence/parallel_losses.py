"""Losses and gradient norms at many sizes of the axes, beside those of one rank, in fp32.

    python -m benchmarks.convergence.parallel_losses [--ranks 4 8] [--sizes "tp2 pp2" cp4]

A GPT-2 (tied, learned positions) and a Llama (grouped queries, SwiGLU, documents kept apart) are
trained at every ZeRO stage on 4 and on 8 ranks of this machine. Ranks that the axes leave over are
replicas. The table has the largest relative difference of any step, of the losses and of the norms.
"""

import argparse
import itertools
import sys
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cluster.configurations import AXES
from benchmarks.shared.pretrain_run import run_step, silent_run, training_batches
from benchmarks.shared.rank_launch import run_on_ranks, write_answer
from benchmarks.shared.result import begin, benchmark_parser, finish, heading, markdown_table
from megatron_zpp.parallel.mesh import Ranks, build_mesh
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.run import Run
from zeropp.ranks.process_group import start_process_group
from zeropp.ranks.topology import Environment

CPU = torch.device("cpu")
COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --lr 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 8 "
    "--make-vocab-size-divisible-by 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--num-workers 0 --eval-iters 0 --clip-grad 0.5 "
)
MODELS = {
    "GPT-2": COMMON,
    "Llama": COMMON + "--swiglu --normalization RMSNorm --position-embedding-type rope "
    "--num-query-groups 4 --disable-bias-linear --untie-embeddings-and-output-weights "
    "--reset-attention-mask --reset-position-ids --eod-mask-loss ",
}
FLAGS = {**AXES, "v": "--num-virtual-stages-per-pipeline-rank"}
GATHERED, SEQUENCE_PARALLEL = "--cp-comm-type allgather", "--sequence-parallel"
SIZES = (
    "tp2", "tp2 sp", "tp4 sp", "pp2", "pp4", "pp2 v2", "cp2", "cp2 gathered", "cp4", "cp4 gathered",
    "tp2 pp2", "tp2 sp pp2", "tp2 cp2", "tp2 cp2 gathered", "pp2 cp2", "pp2 v2 cp2 gathered",
    "pp2 tp2 cp2",
)  # fmt: skip
STAGES = (0, 1, 2, 3)
Meshes = dict[tuple[int, int], DeviceMesh]


def main() -> int:
    """Compare all sizes with one rank and print the table, or be one of the ranks."""
    options = read_options()
    if options.on_ranks is not None:
        train_all(options)
        return 0
    result = begin(__spec__.name)
    arguments = ["--steps", str(options.steps), "--sizes", *options.sizes]
    arguments += ["--stages", *map(str, options.stages)]
    reference = run_on_ranks(__spec__.name, 1, arguments)
    result["rows"] = [
        row
        for num_ranks in options.ranks
        for row in compare(run_on_ranks(__spec__.name, num_ranks, arguments), reference, num_ranks)
    ]
    finish(result, show, options.json)
    return int(any(max(row["losses"], row["norms"]) > 1e-5 for row in result["rows"]))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZES")
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--on-ranks", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def flags_of(sizes: str) -> str:
    """The flags of a row's sizes, as in "tp2 sp pp2"."""
    words = []
    for size in sizes.split():
        letters = size.rstrip("0123456789")
        special = {"gathered": GATHERED, "sp": SEQUENCE_PARALLEL}.get(size)
        words.append(special or f"{FLAGS[letters]} {size.removeprefix(letters)}")
    return " ".join(words)


def train_all(options: argparse.Namespace) -> None:
    """Train every model at every size and stage on these ranks; rank 0 writes the numbers."""
    environment = Environment.read()
    torch.set_num_threads(1)
    start_process_group(environment, CPU, timedelta(minutes=5), "gloo")
    sizes = options.sizes if environment.world_size > 1 else ("",)
    numbers, meshes = {}, Meshes()
    stages = options.stages if environment.world_size > 1 else (0,)
    for model, size, stage in itertools.product(MODELS, sizes, stages):
        flags = f"{MODELS[model]} {flags_of(size)} --zero-stage {stage}"
        if fits(size, environment.world_size):
            numbers[f"{model}/{size}/{stage}"] = train(flags, options.steps, environment, meshes)
    if environment.rank == 0:
        write_answer(options.on_ranks, numbers)
    dist.destroy_process_group()


def fits(size: str, num_ranks: int) -> bool:
    """Whether the ranks can be divided like this."""
    return prod(int(part[2:]) for part in size.split() if part[:2] in AXES) <= num_ranks


def train(
    flags: str, steps: int, environment: Environment, meshes: Meshes
) -> list[tuple[float, float]]:
    """Return loss and norm of each step."""
    run = open_run(f"{flags} --train-iters {steps}", environment, meshes)
    with training_batches(run) as batches:
        iterations = [run_step(run, batches) for _ in range(steps)]
    return [(iteration.loss, iteration.grad_norm) for iteration in iterations]


def open_run(flags: str, environment: Environment, meshes: Meshes) -> Run:
    """Return a run before its first step; `meshes` are those made so far, by their sizes."""
    config = parse(flags.split(), environment.world_size)
    sizes = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    if sizes not in meshes:  # each has process groups of its own
        meshes[sizes] = build_mesh(CPU, environment.world_size, config.parallel)
    mesh = meshes[sizes]
    ranks = Ranks(
        environment=environment, device=CPU, mesh=mesh, store=None,
        context_size=config.parallel.context_parallel_size,
        ranks_per_node=config.zero.zeropp.ranks_per_node,
    )  # fmt: skip
    return silent_run(config, ranks)


def compare(numbers: dict, reference: dict, num_ranks: int) -> list[dict]:
    """A row for each run of `num_ranks` ranks."""
    rows = []
    for name, steps in numbers.items():
        model, sizes, stage = name.split("/")
        expected = reference[f"{model}//0"]
        losses, norms = (
            max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(steps, expected, strict=True))
            for i in range(2)
        )
        row = {"ranks": num_ranks, "model": model, "sizes": sizes, "stage": int(stage)}
        rows.append(row | {"losses": losses, "norms": norms})
    return rows


def show(result: dict) -> None:
    """Print a line for each size, with the largest differences over models and stages."""
    print(heading(result, "torch"))
    key = lambda row: (row["ranks"], row["sizes"])  # noqa: E731
    lines = []
    for (num_ranks, sizes), group in itertools.groupby(sorted(result["rows"], key=key), key):
        rows = list(group)
        worst = {name: max(row[name] for row in rows) for name in ("losses", "norms")}
        lines.append([str(num_ranks), sizes, str(len(rows)), *(f"{w:.1e}" for w in worst.values())])
    columns = "ranks", "sizes", "runs", "losses differ by", "norms differ by"
    print(markdown_table(columns, lines))


if __name__ == "__main__":
    sys.exit(main())
