"""Which layers each rank of a pipeline has, of the ways that the flags can say it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_zpp.settings.parallel import LAYERS_OF_ENDS, ParallelConfig
from zeropp.errors import InputError

WAYS = ("pp_partition_method", *LAYERS_OF_ENDS)
BY_TYPE = ("type:transformer", "type:transformer|embedding")
NEAR = range(-1, 3)  # layers of a rank between the ends, beside the mean


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Seconds of a micro-batch's passes through each layer, and through the output layer."""

    layers: tuple[float, ...]
    head: float

    def of_ranks(self, parallel: ParallelConfig) -> list[float]:
        """Return the seconds of each rank of a pipeline; raises InputError if it has no stages."""
        size, stages = parallel.pipeline_model_parallel_size, parallel.stages(len(self.layers))
        seconds = [0.0] * (size - 1) + [self.head]
        for index, stage in enumerate(stages):
            seconds[index % size] += sum(self.layers[stage.start : stage.stop])
        return seconds


def balanced_stages(
    parallel: ParallelConfig, given: ParallelConfig, seconds: LayerSeconds, tie: float
) -> list[ParallelConfig]:
    """Return `parallel` with the stages to compare: equal ones, and those of the least slow rank.

    The second only if there are no equal ones, or their slowest rank takes longer by more than
    `tie`, a share. What `given` flags say about stages is taken as it is: a method for all
    pipelines, the layers of the ends for those of as many ranks. The result may be empty.
    """
    plain, size = replace(parallel, **dict.fromkeys(WAYS)), parallel.pipeline_model_parallel_size
    own = {name: getattr(given, name) for name in WAYS}
    is_given = given.pp_partition_method or size == given.pipeline_model_parallel_size
    if size == 1:
        return [plain]
    if is_given and any(own.values()):
        ways = [replace(parallel, **own)]
    else:
        ways = [plain, *_uneven(plain, len(seconds.layers))]
    slowest: dict[ParallelConfig, tuple[float, float]] = {}
    for way in ways:
        with suppress(InputError):  # stages that are impossible
            of_ranks = seconds.of_ranks(way)
            slowest[way] = max(of_ranks), max(of_ranks[0], of_ranks[-1])
    best = min(slowest, key=slowest.__getitem__, default=None)
    if ways[0] in slowest and slowest[ways[0]][0] <= (1 + tie) * slowest[best][0]:
        return ways[:1]
    return [way for way in (ways[0], best) if way in slowest]


def _uneven(parallel: ParallelConfig, num_layers: int) -> Iterator[ParallelConfig]:
    """Yield ways to share out layers unequally, also some that are impossible."""
    size = parallel.pipeline_model_parallel_size
    chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    for count in {num_layers // size + each for each in NEAR} if size > 2 else {0}:
        at_ends = num_layers - (size - 2) * count
        for first in range(chunks, at_ends, chunks):
            yield replace(
                parallel, **dict(zip(LAYERS_OF_ENDS, (first, at_ends - first), strict=True))
            )
    yield from (replace(parallel, pp_partition_method=method) for method in BY_TYPE)


def stage_flags(parallel: ParallelConfig) -> dict[str, int | str]:
    """Return the flags that share out the layers of a pipeline unequally, with their values."""
    values = {f"--{name.replace('_', '-')}": getattr(parallel, name) for name in WAYS}
    return {name: value for name, value in values.items() if value is not None}
