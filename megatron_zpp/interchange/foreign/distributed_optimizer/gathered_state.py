"""The distributed optimizer's state as the first data-parallel rank gathers it.

Megatron-LM's legacy checkpoints have it in distrib_optim.pt beside the model of each rank,
torch_dist checkpoints of the kind dp_zero_gather_scatter as one pickled object of each rank. By
model chunk and dtype it holds the fp32 weights and Adam's moments as flat vectors: of all buckets
one after another without the padding at their ends, or, before mid-2024, of each bucket with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_zpp.interchange.foreign.distributed_optimizer.bucket_layout import (
    ALIGNMENT,
    BucketLayout,
    lay_out,
    of_numels,
    of_size,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.stage_parameters import RankParameters
from megatron_zpp.interchange.foreign.tensor_files import REMEDY, LazyTensor, UnmappedStateError
from zeropp.errors import InputError
from zeropp.optim import MOMENTS

MAIN = "param"  # the fp32 weights
KEYS = (MAIN, *MOMENTS)
ByKey = dict[str, dict[str, LazyTensor]]  # by KEYS and names of parameters
_NUMELS, _ALL_NUMELS = "per_bucket_numel_unpadded", "per_bucket_numel"


@dataclass(frozen=True, kw_only=True)
class GatheredState:
    """The state of one rank; `where` is what errors call it."""

    where: str
    content: Mapping[Any, Any]

    @staticmethod
    def of(content: Any, where: str) -> "GatheredState":
        """Return a state; raises UnmappedStateError for kinds that do not say what lies where."""
        if isinstance(content, list):
            raise UnmappedStateError("it is that of several optimizers")
        if not isinstance(content, Mapping):
            raise InputError(f"{where}: holds a {type(content).__name__}, no optimizer's state")
        if "buckets_coalesced" not in content and _NUMELS not in content:
            raise UnmappedStateError(
                "the distributed optimizer of a Megatron-LM before 2024 does not say how long its "
                "buckets are; load and save the checkpoint with a newer one to bring it along"
            )
        return GatheredState(where=where, content=content)

    @property
    def chunks(self) -> int:
        """The number of the model's chunks."""
        return sum(isinstance(key, int) for key in self.content)

    def parts(
        self, chunk: int, parameters: RankParameters, bucket_size: int | None
    ) -> ByKey | None:
        """Return the parameters' tensors; None if the state has not as many numbers.

        Raises InputError if the state contradicts itself, UnmappedStateError for 8-bit weights.
        """
        dtype, vectors = self._only_dtype(chunk)
        if "numel_unpadded" in vectors:
            layout = self._joined(vectors, parameters, bucket_size)
            buckets = {key: [vectors[key]] for key in KEYS}
        else:
            layout = self._by_bucket(chunk, dtype, vectors, parameters)
            buckets = vectors
        if layout is None:
            return None
        return {key: dict(_cut(layout, parameters, buckets[key])) for key in KEYS}

    def _only_dtype(self, chunk: int) -> tuple[Any, Mapping[str, Any]]:
        if chunk not in self.content:
            raise InputError(
                f"{self.where}: has the state of {self.chunks} model chunks, but the model has "
                f"further ones{REMEDY}"
            )
        by_dtype = self.content[chunk]
        require_one_dtype(by_dtype)
        ((dtype, vectors),) = by_dtype.items()
        if not isinstance(vectors, Mapping):
            raise TypeError(f"the state of a model chunk is a {type(vectors).__name__}")
        missing = [key for key in KEYS if key not in vectors]
        if missing:
            raise UnmappedStateError(f"it has no {', '.join(missing)}, so it is not Adam")
        return dtype, vectors

    def _joined(
        self, vectors: Mapping[str, Any], parameters: RankParameters, bucket_size: int | None
    ) -> BucketLayout | None:
        numel = vectors["numel_unpadded"]
        for key in KEYS:
            self._require_length(key, vectors[key], numel)
        for size in dict.fromkeys((bucket_size, None)):
            layout = lay_out(parameters.numels(), parameters.own_bucket, of_size(size)).joined()
            if layout.bucket_numels == (numel,):
                return layout
        return None

    def _by_bucket(
        self,
        chunk: int,
        dtype: Any,
        vectors: Mapping[str, Sequence[Tensor]],
        parameters: RankParameters,
    ) -> BucketLayout | None:
        numels, padded = (self.content[name][chunk][dtype] for name in (_NUMELS, _ALL_NUMELS))
        for key in KEYS:
            if len(vectors[key]) != len(padded):
                raise InputError(
                    f"{self.where}: {key} has {len(vectors[key])} buckets, but says that there "
                    f"are {len(padded)}{REMEDY}"
                )
            for vector, numel in zip(vectors[key], padded, strict=True):
                self._require_length(key, vector, numel)
        for alignment in (ALIGNMENT, 1):  # before 2024 nothing was aligned
            layout = lay_out(
                parameters.numels(), parameters.own_bucket, of_numels(numels), alignment
            )
            if layout.bucket_numels == tuple(numels):
                return layout
        return None

    def _require_length(self, key: str, vector: Tensor, numel: int) -> None:
        if [*vector.shape] != [int(numel)]:
            raise InputError(
                f"{self.where}: {key} has {vector.numel():,} numbers, but says that it has "
                f"{numel:,}: it is damaged, or mixed up with another{REMEDY}"
            )


def require_one_dtype(dtypes: Mapping[Any, Any] | Sequence[Any]) -> None:
    """Raise UnmappedStateError for buffers of 8-bit weights, or of several dtypes."""
    if any("uint8" in str(dtype) for dtype in dtypes):
        raise UnmappedStateError("its weights were 8-bit numbers (--fp8-param-gather)")
    if len(dtypes) != 1:
        raise UnmappedStateError("the distributed optimizer has buckets of several dtypes")


def _cut(
    layout: BucketLayout, parameters: RankParameters, buckets: Sequence[Tensor]
) -> Iterator[tuple[str, LazyTensor]]:
    for name, shape in parameters.shapes.items():
        place = layout.places[name]
        yield name, LazyTensor.of(buckets[place.bucket][place.start : place.end].view(shape))
