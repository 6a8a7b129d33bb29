"""The distributed optimizer's state in torch_dist checkpoints, a tensor for each bucket.

megatron-core calls it dp_reshardable, until 0.14 fully_sharded_bucket_space. Each rank of a tensor-
and pipeline-parallel group has the fp32 weights and Adam's moments of its buckets, flat, without
the padding at their ends, which older ones have. What a data-parallel rank has of a parameter is a
chunk of its own, so that a layout can be checked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_zpp.interchange.foreign.distributed_optimizer.bucket_layout import (
    BucketLayout,
    lay_out,
    of_numels,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.gathered_state import (
    KEYS,
    MAIN,
    ByKey,
    require_one_dtype,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.stage_parameters import RankParameters
from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.foreign.tensor_files import REMEDY
from zeropp.errors import InputError

PREFIX = "optimizer.distributed.dp_group_idx_"
_BUCKET = re.compile(
    re.escape(PREFIX) + r"(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)"
)
_NUMELS, _PADDED_NUMELS = "per_bucket_numel_unpadded", "per_bucket_numel"


def object_name(rank: int, key: str) -> str:
    """Return the name of a pickled object of a rank."""
    return f"{PREFIX}{rank}.{key}/shard_0_1"


@dataclass(frozen=True, kw_only=True)
class BucketTensors:
    """The buckets of one rank; `names` by model chunk, bucket and key."""

    tensors: ShardTensors
    rank: int
    names: Mapping[tuple[int, int, str], str]

    @staticmethod
    def by_rank(tensors: ShardTensors) -> "dict[int, BucketTensors]":
        """Return those of all ranks; raises UnmappedStateError for buckets of several dtypes."""
        names: dict[int, dict[tuple[int, int, str], str]] = {}
        dtypes = {}
        for name in tensors.shapes():
            if match := _BUCKET.fullmatch(name):
                rank, chunk, bucket = (int(match[group]) for group in (1, 2, 4))
                names.setdefault(rank, {})[chunk, bucket, match[5]] = name
                dtypes[match[3]] = None
        if dtypes:
            require_one_dtype(list(dtypes))
        return {
            rank: BucketTensors(tensors=tensors, rank=rank, names=each)
            for rank, each in names.items()
        }

    @property
    def chunks(self) -> int:
        """The number of the model's chunks."""
        return len(self._numels)

    def parts(
        self, chunk: int, parameters: RankParameters, bucket_size: int | None
    ) -> ByKey | None:
        """Return the parameters' tensors; None if the buckets are not of these parameters.

        Raises InputError if the checkpoint contradicts itself.
        """
        layout = self._layout(chunk, parameters)
        if layout is None:
            return None
        return {
            key: {
                name: self.tensors.flat_part(
                    self.names[chunk, place.bucket, key], place.start, place.end
                ).view(parameters.shapes[name])
                for name, place in layout.places.items()
            }
            for key in KEYS
        }

    def _layout(self, chunk: int, parameters: RankParameters) -> BucketLayout | None:
        numels = self._numels[chunk]
        layout = lay_out(parameters.numels(), parameters.own_bucket, of_numels(numels))
        if layout.bucket_numels != tuple(numels):
            return None
        ends = [
            self.tensors.chunk_ends(self.names[chunk, bucket, MAIN])
            for bucket in range(len(numels))
        ]
        fits = all(
            {place.start, place.end} <= ends[place.bucket] for place in layout.places.values()
        )
        return layout if fits else None

    @cached_property
    def _numels(self) -> list[list[int]]:
        """The numbers of each chunk's buckets, without padding; checked to be there."""
        unpadded, padded = (self._stored(key) for key in (_NUMELS, _PADDED_NUMELS))
        sizes = {
            (chunk, bucket): numels
            for chunk, of_chunk in enumerate(zip(unpadded, padded, strict=True))
            for bucket, numels in enumerate(zip(*of_chunk, strict=True))
        }
        wanted = {(*place, key) for place in sizes for key in KEYS}
        buckets = {each for each in self.names if each[2] in KEYS}
        if buckets != wanted:
            raise InputError(
                f"{self.tensors.folder}: has {len(buckets)} tensors of the distributed optimizer's "
                f"rank {self.rank}, but says that there are {len(wanted)}{REMEDY}"
            )
        for chunk, bucket, key in wanted:
            name = self.names[chunk, bucket, key]
            shape = list(self.tensors.shape(name))
            if shape not in [[numel] for numel in sizes[chunk, bucket]]:
                raise InputError(
                    f"{self.tensors.folder}: {name} has shape {shape}, but it says that it has "
                    f"{sizes[chunk, bucket][0]:,} numbers: files are mixed up{REMEDY}"
                )
        return unpadded

    def _stored(self, key: str) -> list[list[int]]:
        """Return lengths that the checkpoint says, [chunk][bucket]."""
        by_chunk = self.tensors.pickled(object_name(self.rank, key))
        for by_dtype in by_chunk:
            require_one_dtype(list(by_dtype))
        return [list(*by_dtype.values()) for by_dtype in by_chunk]
