"""Layouts of parameters in buckets, as megatron-core recorded them, and random ones."""

import random

import pytest
import torch

from megatron_zpp.interchange.foreign.distributed_optimizer.bucket_layout import (
    BucketLayout,
    BucketRange,
    lay_out,
    of_numels,
    of_size,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.bucket_tensors import BucketTensors
from megatron_zpp.interchange.foreign.distributed_optimizer.gathered_state import (
    KEYS,
    MAIN,
    GatheredState,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.stage_parameters import (
    EMBEDDING,
    OUTPUT,
    ModelChunks,
    RankParameters,
    orders,
)
from megatron_zpp.interchange.foreign.rank_parts import LAYERS, SavedGrid
from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.foreign.tensor_files import LazyTensor
from tests.megatron_zpp.interchange.foreign.recorded_checkpoints import unpack

SEEDS = range(30)
# Of recorded checkpoints' first ranks: the numbers of parameters as megatron-core defined them.
LLAMA_LAYER = {"proj": 128, "norm1": 16, "qkv": 256, "norm2": 16, "fc1": 384, "fc2": 192}


def written(
    numels: dict[str, int], own: set[str], bucket_size: int | None, alignment: int
) -> list[list[str | None]]:
    """The buckets of a buffer number by number, each named as its parameter, None for padding."""
    buckets: list[list[str | None]] = [[]]
    for name, numel in reversed(numels.items()):
        buckets[-1] += [None] * (-len(buckets[-1]) % alignment)
        if name in own and buckets[-1]:
            buckets.append([])
        buckets[-1] += [name] * numel
        if name in own or (bucket_size is not None and len(buckets[-1]) >= bucket_size):
            buckets.append([])
    return [bucket for bucket in buckets if bucket]


def places(buckets: list[list[str | None]]) -> dict[str, BucketRange]:
    return {
        name: BucketRange(number, bucket.index(name), bucket.index(name) + bucket.count(name))
        for number, bucket in enumerate(buckets)
        for name in dict.fromkeys(bucket)
        if name is not None
    }


def random_buffer(seed: int, alignment: int) -> tuple[dict[str, int], set[str], int | None]:
    """Parameters of random sizes, up to two with buckets of their own, and a size of buckets."""
    draw = random.Random(seed)
    numels = {
        f"p{number}": draw.choice([draw.randint(1, 300), 64 * draw.randint(1, 4)])
        for number in range(draw.randint(1, 12))
    }
    own = set(draw.sample(sorted(numels), k=min(draw.randint(0, 2), len(numels))))
    return numels, own, draw.choice([None, draw.randint(1, 900)])


@pytest.mark.parametrize("alignment", [1, 64])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_buffers_are_laid_out_as_they_are_written(seed, alignment):
    numels, own, size = random_buffer(seed, alignment)
    buckets = written(numels, own, size, alignment)
    layout = lay_out(numels, own, of_size(size), alignment)
    assert layout.places == places(buckets)
    assert list(layout.bucket_numels) == [len(bucket) for bucket in buckets]
    # The sizes of the buckets say as much as the size at which they were cut.
    assert lay_out(numels, own, of_numels(layout.bucket_numels), alignment) == layout
    joined = places([[name for bucket in buckets for name in bucket]])
    assert layout.joined().places == joined


def state_content(buckets: list[torch.Tensor], numels: tuple[int, ...], *, joined: bool) -> dict:
    """What the first data-parallel rank saves of one chunk; padding at ends is garbage."""
    dtype = (torch.bfloat16, torch.float32)
    if joined:
        vector = torch.cat(buckets)
        vectors = {key: vector + at for at, key in enumerate(KEYS)}
        return {
            "buckets_coalesced": True,
            0: {dtype: {**vectors, "numel_unpadded": sum(numels)}},
        }
    padded = [torch.nn.functional.pad(each, (0, -len(each) % 384), value=7.0) for each in buckets]
    return {
        "per_bucket_numel": [{torch.float32: [len(each) for each in padded]}],
        "per_bucket_numel_unpadded": [{torch.float32: list(numels)}],
        0: {torch.float32: {key: [each + at for each in padded] for at, key in enumerate(KEYS)}},
    }


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_states_are_read_back(seed, joined):
    numels, own, size = random_buffer(seed, 64)
    alignment = 64 if joined or seed % 2 else 1
    tensors = {name: torch.rand(numel) for name, numel in numels.items()}
    layout = lay_out(numels, own, of_size(size), alignment)
    buckets = [torch.full((numel,), 9.0) for numel in layout.bucket_numels]
    for name, place in layout.places.items():
        buckets[place.bucket][place.start : place.end] = tensors[name]
    content = state_content(buckets, layout.bucket_numels, joined=joined)
    state = GatheredState.of(content, "it")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    parts = state.parts(0, RankParameters(shapes=shapes, own_bucket=frozenset(own)), size)
    for at, key in enumerate(KEYS):
        assert parts[key].keys() == tensors.keys()
        assert all(torch.equal(parts[key][name].read(), tensors[name] + at) for name in tensors)
    shapes["p0"] = torch.Size([numels["p0"] + 64])
    assert state.parts(0, RankParameters(shapes=shapes, own_bucket=frozenset(own)), size) is None


def model_weights(layers: int, draw: random.Random, *, is_tied: bool) -> dict[str, LazyTensor]:
    """The weights of a model, of random sizes, without values."""
    width, hidden = 8 * draw.randint(1, 6), 8 * draw.randint(1, 9)
    shapes = {"decoder.final_layernorm.weight": [width], EMBEDDING: [96, width]}
    if not is_tied:
        shapes[OUTPUT] = [96, width]
    for layer in range(layers):
        shapes |= {
            f"{LAYERS}{layer}.mlp.linear_fc1.weight": [hidden, width],
            f"{LAYERS}{layer}.mlp.linear_fc2.weight": [width, hidden],
            f"{LAYERS}{layer}.input_layernorm.weight": [width],
            f"{LAYERS}{layer}.self_attention.linear_proj.weight": [width, width],
        }
    return {
        name: LazyTensor.of(torch.empty(shape, device="meta")) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_the_layers_of_pipeline_stages_follow_from_their_buckets(seed):
    draw = random.Random(seed)
    stages, chunks, is_tied = draw.randint(1, 3), draw.randint(1, 2), draw.random() < 0.5
    counts = [draw.randint(0, 3) for _ in range(stages * chunks)]
    counts[0] += 1
    grid = SavedGrid(where="it", tensor_ranks=2, is_gated=False, is_tied=is_tied)
    model = ModelChunks.of(model_weights(sum(counts), draw, is_tied=is_tied), grid, stages, chunks)
    for order in orders({"transformer_impl": draw.choice(["local", "transformer_engine"])}):
        saved: list[BucketLayout] = []
        expected: list[dict[str, torch.Size]] = []

        def save(position: int, parameters: RankParameters, expected=expected, saved=saved):
            local = [name for name in parameters.shapes if name.endswith("fc1.weight")]
            if len(local) != counts[position]:
                return None
            expected.append(dict(parameters.shapes))
            saved.append(lay_out(parameters.numels(), parameters.own_bucket, of_size(2000)))
            return True

        def fit(position: int, parameters: RankParameters, saved=saved):
            numels = saved[position].bucket_numels
            layout = lay_out(parameters.numels(), parameters.own_bucket, of_numels(numels))
            return dict(parameters.shapes) if layout.bucket_numels == numels else None

        assert model.split(order, save) is not None
        assert model.split(order, fit) == expected
        assert list(expected[0])[0] == EMBEDDING
        if is_tied:
            assert (OUTPUT in expected[-1]) == (stages > 1)


def test_recorded_buckets_are_those_that_their_size_makes(tmp_path):
    """--ddp-bucket-size 1000 of llama, with Transformer Engine's order of modules."""
    folder = unpack("megatron_torch_dist_buckets_llama", tmp_path) / "iter_0000003"
    numels = {"embedding": 768}
    numels |= {f"{layer}.{key}": size for layer in (0, 1) for key, size in LLAMA_LAYER.items()}
    numels |= {"final": 16, "output": 768}
    layout = lay_out(numels, set(), of_size(1000))
    tensors = ShardTensors(folder)
    names = BucketTensors.by_rank(tensors)[0].names
    stored = [tensors.shape(names[0, bucket, MAIN]).numel() for bucket in range(len(names) // 3)]
    assert list(layout.bucket_numels) == stored and len(stored) > 2
    for place in layout.places.values():
        assert {place.start, place.end} <= tensors.chunk_ends(names[0, place.bucket, MAIN])
    wrong_order = {"embedding": 768, **dict(reversed(list(numels.items())[1:]))}
    assert lay_out(wrong_order, set(), of_size(1000)).places != layout.places
