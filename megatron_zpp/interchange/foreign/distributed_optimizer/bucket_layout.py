"""Where each parameter lies in the buckets of Megatron's distributed optimizer.

A buffer holds the parameters of one model chunk of a rank, the last that the model defines first,
each from a multiple of ALIGNMENT numbers on. It is cut into buckets. Weights that the first and the
last pipeline stage share have a bucket of their own. The ends of buckets are padded for the
data-parallel ranks; checkpoints leave that padding out, or say how long it is. After
megatron-core's `_ParamAndGradBuffer`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

ALIGNMENT = 64
# Whether a bucket, by its number, is complete once it has so many numbers.
IsFull = Callable[[int, int], bool]


@dataclass(frozen=True)
class BucketRange:
    """The numbers of a parameter: from `start` to `end` of a bucket."""

    bucket: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Places of parameters by name; numbers of each bucket, without the padding at its end."""

    places: Mapping[str, BucketRange]
    bucket_numels: tuple[int, ...]

    def joined(self) -> "BucketLayout":
        """Return the layout of one bucket in which all lie one after another."""
        starts = [sum(self.bucket_numels[:bucket]) for bucket in range(len(self.bucket_numels))]
        places = {
            name: BucketRange(
                0, starts[place.bucket] + place.start, starts[place.bucket] + place.end
            )
            for name, place in self.places.items()
        }
        return BucketLayout(places=places, bucket_numels=(sum(self.bucket_numels),))


def lay_out(
    numels: Mapping[str, int], own_bucket: Set[str], is_full: IsFull, alignment: int = ALIGNMENT
) -> BucketLayout:
    """Return the layout of parameters with so many numbers, in the order of their definition.

    Those named in `own_bucket` share their buckets with no other.
    """
    places: dict[str, BucketRange] = {}
    finished: list[int] = []
    end = 0  # of what is in the bucket that is being filled
    for name in reversed(numels):
        start = -(-end // alignment) * alignment
        if name in own_bucket and end:
            finished.append(start)
            start = 0
        end = start + numels[name]
        places[name] = BucketRange(len(finished), start, end)
        if name in own_bucket or is_full(len(finished), end):
            finished.append(end)
            end = 0
    return BucketLayout(places=places, bucket_numels=(*finished, *([end] if end else [])))


def of_size(bucket_size: int | None) -> IsFull:
    """Buckets that are complete at a size; without one there is a single bucket."""
    return lambda bucket, end: bucket_size is not None and end >= bucket_size


def of_numels(bucket_numels: Sequence[int]) -> IsFull:
    """Buckets that have these numbers."""
    return lambda bucket, end: bucket < len(bucket_numels) and end >= bucket_numels[bucket]
