"""`--dry-run`: what a run will take, and whether it fits, before anything of it is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from megatron_zpp.data.text_source import resolve_vocab_size
from megatron_zpp.models.pretrained_model import lora_summary, with_initial_model
from megatron_zpp.monitor.console import Console
from megatron_zpp.planner import estimate as kinds
from megatron_zpp.planner.estimate import Estimate, estimate
from megatron_zpp.settings.config import Config
from zeropp.ranks.host_memory import free_bytes
from zeropp.ranks.topology import Environment
from zeropp.wire.route import Nodes

TOO_LARGE = 1  # exit status
MIB, GIB = 2**20, 2**30
_STATE = "more ranks or a higher --zero-stage cut the state of the model into smaller parts"
_FEWER = "a smaller --micro-batch-size and more micro-batches do the same in less"
ADVICE = MappingProxyType(
    {
        **dict.fromkeys((kinds.WEIGHTS, kinds.MOMENTS, kinds.GRADIENTS), _STATE),
        kinds.GATHERED: "--zero-stage 3 gathers one block after the other",
        kinds.COPIES: "a larger zero_hpz_partition_size keeps smaller copies",
        kinds.REDUCED: "--zero-stage 2 or 3 sums smaller gradients, and smaller blocks help",
        kinds.KEPT: f"--recompute-granularity full keeps least, and {_FEWER}",
        kinds.HEAD: _FEWER,
    }
)
TO_HOST = "; --cpu-optimizer moves fp32 weights, gradients and moments to the host"
FROM_HOST = "; offload_optimizer.ratio below 1 leaves some of it on the device"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A memory, in bytes: what `ranks` ranks need of it together; None: nobody knows its size."""

    name: str
    needed: int
    size: int | None
    ranks: int = 1

    @property
    def fits(self) -> bool:
        return self.size is None or self.needed * self.ranks <= self.size

    def __str__(self) -> str:
        ranks = f" for {self.ranks} ranks" if self.ranks > 1 else ""
        size = "an unknown size" if self.size is None else f"{self.size / GIB:.2f} GiB"
        return f"{self.name}: {self.needed * self.ranks / GIB:.2f} GiB{ranks}, of {size}"


def dry_run(requested: Config, environment: Environment, console: Console) -> int:
    """Print what the run of `requested` will take; the exit status is 1 if it does not fit.

    Raises InputError for mistakes of the user.
    """
    config, _ = with_initial_model(requested)
    gpu = find_gpu(environment)
    nodes, ranks_here = _ranks(config, environment)
    entries = resolve_vocab_size(config.data, config.tokenizer)
    foretold = estimate(config, entries, nodes, is_cpu=gpu is None)
    places = _places(foretold, gpu, ranks_here)
    too_small = [place for place in places if not place.fits]
    rows = _rows(config, foretold, entries)
    verdict = "does not fit" if too_small else "fits"
    console.table("Dry run", [*rows, (verdict, "\n".join(map(str, places)))])
    for place in too_small:
        console.line(f"error: does not fit, {place}: {_advice(place, foretold, config)}")
    return TOO_LARGE if too_small else 0


def find_gpu(environment: Environment) -> tuple[str, int] | None:
    """The name of this rank's GPU and the bytes of its memory; None where there is none."""
    if not torch.cuda.is_available():
        return None
    index = environment.local_rank % torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory


def _ranks(config: Config, environment: Environment) -> tuple[Nodes, int]:
    """The nodes of the run, and how many of its ranks share this machine's memory."""
    asked, per_node = config.training.dry_run_ranks, config.zero.zeropp.ranks_per_node
    count = asked or environment.world_size
    launched = environment.launched and not asked
    per_node = per_node or (environment.local_world_size if launched else count)
    nodes = Nodes.of(range(count), min(per_node, count))
    here = -(-count // environment.machines) if launched else nodes.ranks_per_node
    return nodes, here


def _places(foretold: Estimate, gpu: tuple[str, int] | None, ranks_here: int) -> list[Place]:
    host = Place(name="host", needed=foretold.host_bytes, size=free_bytes(), ranks=ranks_here)
    if gpu is None:
        return [host]
    device = Place(name=gpu[0], needed=foretold.device_bytes, size=gpu[1])
    return [device, host] if foretold.host_bytes else [device]


def _rows(config: Config, foretold: Estimate, entries: int) -> list[tuple[str, object]]:
    model, sharding = config.model, foretold.sharding
    shape = (
        f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} "
        f"heads, vocabulary {entries:,}"
    )
    batch = (
        f"{foretold.micro_batches} micro-batches of {config.batch.micro_batch_size} samples of "
        f"{model.seq_length} tokens on each of {sharding.num_ranks} ranks"
    )
    places = ("device", "host") if foretold.device else ("host",)
    return [
        ("model", f"{shape}: {foretold.parameters:,} parameters"),
        *lora_summary(config, sharding),
        ("batch", batch),
        ("precision", str(sharding.compute_dtype).removeprefix("torch.")),
        ("ZeRO stage", sharding.stage),
        *sharding.describe(foretold.micro_batches),
        ("memory", _table({place: getattr(foretold, place) for place in places})),
    ]


def _table(places: Mapping[str, Mapping[str, int]]) -> str:
    """Lines of MiB by kind, a column for each place; kinds that take nothing are left out."""
    title = "MiB of a rank, at most"
    lines = [f"{title:<24}" + "".join(f"{place:>14}" for place in places)]
    for kind in kinds.KINDS:
        sizes = [place.get(kind, 0) for place in places.values()]
        if any(sizes):
            lines.append(f"{kind:<24}" + "".join(f"{size / MIB:14.2f}" for size in sizes))
    totals = "".join(f"{sum(place.values()) / MIB:14.2f}" for place in places.values())
    return "\n".join([*lines, f"{'total':<24}{totals}"])


def _advice(place: Place, foretold: Estimate, config: Config) -> str:
    """What to do about a memory that is too small, by what takes most of it."""
    held = foretold.host if place.name == "host" else foretold.device
    advice = ADVICE[max(held, key=held.__getitem__)]
    if place.ranks > 1:
        advice += "; fewer ranks on a machine share its memory among fewer"
    if not foretold.device:
        return advice
    if not config.zero.offloads_optimizer:
        return advice + TO_HOST
    return advice + (FROM_HOST if place.name == "host" else "")
