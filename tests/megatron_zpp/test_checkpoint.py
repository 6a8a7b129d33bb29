"""Checkpoints: equal to the last bit at other numbers of ranks and stages, complete or absent."""

import logging
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_zpp import checkpoint, manifest
from megatron_zpp.checkpoint import TrainingState
from tests.ranks import ranks
from zeropp.errors import InputError

ARCHITECTURE = {"hidden_size": 7, "num_layers": 2}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 5)
        self.down = nn.Linear(5, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that no number of ranks divides, a dimension of 1, a tied weight and a buffer."""

    def __init__(self, size: int = 7, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Linear(size, size, bias=False)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_layers))
        self.head = nn.Linear(size, 1)
        self.tied = nn.Linear(size, size, bias=False)
        self.tied.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tied(x))


def build(stage: int, seed: int, size: int = 7, num_layers: int = 2) -> tuple[nn.Module, object]:
    """Return a model sharded over the ranks there are, and an AdamW with two groups."""
    torch.manual_seed(seed)
    model = Net(size, num_layers)
    if dist.is_initialized() and dist.get_world_size() > 1:
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        if stage == 0:
            mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replica", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in (*model.blocks, model):
            module.set_reshard_after_backward(stage == 3, recurse=False)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict:
    """Return everything that must survive, whole and copied."""
    state = model.state_dict()
    found = {f"model.{name}": whole(value) for name, value in state.items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{key}"] = whole(value)
    return found


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def state_at(iteration: int, **other: object) -> TrainingState:
    facts = {
        "iteration": iteration, "consumed_samples": 4 * iteration, "consumed_tokens": 28 * iteration,
        "seed": 1234, "world_size": 4, "stage": 3, "tokenizer": "abc", "architecture": ARCHITECTURE,
        "loss_scaler": {"scale": 2.0**16, "hysteresis": 1}, "configuration": {"lr": 0.1 + 0.2},
    }
    return TrainingState(**(facts | other))


@ranks(4)
def save_on_four(folder: Path, stage: int, iterations: tuple[int, ...], keep: int | None) -> None:
    model, optimizer = build(stage, seed=1)
    for iteration in iterations:
        train(model, optimizer, 2)
        checkpoint.save(folder, model, optimizer, state_at(iteration, stage=stage), keep=keep)
        expected = contents(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, folder / f"expected_{iteration}.pt")


def load_here(folder: Path, stage: int, iteration: int) -> None:
    model, optimizer = build(stage, seed=2)
    train(model, optimizer, 1 if stage else 0)  # into an optimizer that has state, or has none
    state = checkpoint.load(folder, model, optimizer, architecture=ARCHITECTURE, tokenizer="abc")
    assert state.iteration == iteration
    expected = torch.load(folder / f"expected_{iteration}.pt")
    assert equal(contents(model, optimizer), expected)
    train(model, optimizer, 1)  # what was loaded is what trains on
    assert not equal(contents(model, optimizer), expected)
    steps = {whole(s["step"]).item() for s in optimizer.state.values()}
    assert steps == {expected["optimizer.head.weight.step"].item() + 1}


@ranks(4)
def load_on_four(folder: Path, stage: int, iteration: int) -> None:
    load_here(folder, stage, iteration)


@ranks(2)
def load_on_two(folder: Path, stage: int, iteration: int) -> None:
    load_here(folder, stage, iteration)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loads_at_other_ranks_and_stages(stage: int, tmp_path: Path) -> None:
    save_on_four(folder=tmp_path, stage=stage, iterations=(2,), keep=None)
    load_on_four(folder=tmp_path, stage=(stage + 1) % 4, iteration=2)
    load_on_two(folder=tmp_path, stage=3 - stage, iteration=2)
    load_here(tmp_path, 0, 2)  # without a process group


@ranks(2)
def compare_updates(folder: Path) -> None:
    """Four steps in one go, and two, saved, loaded elsewhere, two more, are the same."""
    model, optimizer = build(3, seed=1)
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer, state_at(2))
    train(model, optimizer, 2)
    again, optimizer_again = build(3, seed=5)
    checkpoint.load(folder, again, optimizer_again)
    train(again, optimizer_again, 2)
    assert equal(contents(model, optimizer), contents(again, optimizer_again))


def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    compare_updates(folder=tmp_path)


def test_state_survives_as_it_was(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    train(model, optimizer, 1)
    written = state_at(1, rng={"words": [2**63, 1]}, schedule={"lr": 1e-5 / 3})
    path = checkpoint.save(tmp_path, model, optimizer, written)
    assert checkpoint.load(tmp_path, model, optimizer) == written == checkpoint.read_state(path)
    assert (tmp_path / manifest.POINTER).read_text() == "1\n"
    assert path == tmp_path / "iter_0000001"


def test_settings_are_not_state(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path, model, optimizer, state_at(1))
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25)
    checkpoint.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    assert checkpoint.load(tmp_path / "nowhere", model, optimizer) is None
    assert checkpoint.load(tmp_path, model, optimizer) is None


def test_optimizer_can_be_left_out(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path, model, optimizer, state_at(1), save_optimizer=False)
    other, fresh = build(0, seed=2)
    with pytest.raises(InputError, match="--no-load-optim"):
        checkpoint.load(tmp_path, other, fresh)
    checkpoint.load(tmp_path, other, fresh, load_optimizer=False)
    assert not fresh.state
    assert torch.equal(other.head.weight, model.head.weight)


def test_saved_before_the_first_update(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    checkpoint.save(tmp_path, model, optimizer, state_at(0))
    other, fresh = build(0, seed=2)
    assert checkpoint.load(tmp_path, other, fresh).iteration == 0
    assert not fresh.state and torch.equal(other.head.weight, model.head.weight)


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path, model, optimizer, state_at(1))
    wrapped, _ = build(0, seed=2)
    wrapped.blocks[0] = torch.compile(wrapped.blocks[0], backend="eager")
    checkpoint.load(tmp_path, wrapped, None)
    assert torch.equal(wrapped.blocks[0].up.weight, model.blocks[0].up.weight)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    save_on_four(folder=tmp_path, stage=3, iterations=(1, 2, 3, 4), keep=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004"]


def test_pruning_spares_what_is_not_ours_or_newer(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    (tmp_path / "iter_0000001").mkdir()
    for iteration in (2, 3, 9, 4):
        checkpoint.save(tmp_path, model, optimizer, state_at(iteration), keep=1)
    assert names(tmp_path) == ["iter_0000001", "iter_0000004", "iter_0000009"]
    assert checkpoint.load(tmp_path, model, optimizer).iteration == 4  # the one pointed to


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "iter_" in path.name)


# Damage


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save_on_four(folder=folder, stage=2, iterations=(1, 2), keep=None)
    return folder


def truncate(path: Path) -> None:
    shard = path / "__2_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-9])


def flip(path: Path) -> None:
    shard = path / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def lose_shard(path: Path) -> None:
    (path / "__3_0.distcp").unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def halve_manifest(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:100])


DAMAGES = [
    (truncate, "__2_0.distcp has"),
    (flip, "the content of __1_0.distcp changed"),
    (lose_shard, "__3_0.distcp is missing"),
    (lose_manifest, "manifest.json is missing"),
    (halve_manifest, "manifest.json is not readable"),
    (shutil.rmtree, "iter_0000002 does not exist"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_newest_is_named_and_the_one_before_used(
    damage: object, message: str, two_checkpoints: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    damage(folder / "iter_0000002")
    with caplog.at_level(logging.WARNING, "megatron_zpp"):
        load_here(folder, 0, 1)
    assert message in caplog.text
    assert str(folder / "iter_0000002") in caplog.text
    load_on_two(folder=folder, stage=3, iteration=1)


@ranks(2)
def expect_none_complete(folder: Path) -> None:
    model, optimizer = build(3, seed=2)
    with pytest.raises(InputError) as error:
        checkpoint.load(folder, model, optimizer)
    assert "iter_0000001: the content of __1_0.distcp changed" in str(error.value)
    assert "iter_0000002: __3_0.distcp is missing" in str(error.value)


def test_none_complete_is_an_error_that_names_each(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    flip(folder / "iter_0000001")
    lose_shard(folder / "iter_0000002")
    expect_none_complete(folder=folder)


@pytest.mark.parametrize("text", ["", "soon", None])
def test_newest_is_used_without_a_pointer(text: str, two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    pointer = folder / manifest.POINTER
    pointer.unlink() if text is None else pointer.write_text(text)
    assert checkpoint.choose(folder) == folder / "iter_0000002"


def test_pointer_can_be_set_back(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    (folder / manifest.POINTER).write_text("1\n")
    assert checkpoint.choose(folder) == folder / "iter_0000001"


# Another architecture


@ranks(2)
def expect_other_architecture(folder: Path) -> None:
    model, optimizer = build(3, seed=2, size=8, num_layers=3)
    before = contents(model, optimizer)
    with pytest.raises(InputError) as error:
        checkpoint.load(
            folder, model, optimizer, architecture={"hidden_size": 8, "num_layers": 3}
        )
    text = str(error.value)
    assert "hidden_size is 7 in the checkpoint, 8 in the model" in text
    assert "num_layers is 2 in the checkpoint, 3 in the model" in text
    assert "embedding.weight has shape [7, 7] in the checkpoint, [8, 8] in the model" in text
    assert "blocks.1.up.weight has shape [5, 7] in the checkpoint, [5, 8] in the model" in text
    assert "blocks.0.up.bias" not in text  # equal
    assert "only in the model: blocks.2.norm.weight" in text
    assert equal(contents(model, optimizer), before)


def test_other_architecture_names_each_difference(two_checkpoints: Path) -> None:
    expect_other_architecture(folder=two_checkpoints)


def test_smaller_model_names_what_is_left_over(two_checkpoints: Path) -> None:
    model, _ = build(0, seed=2, num_layers=1)
    with pytest.raises(InputError, match=r"only in the checkpoint: blocks\.1\.norm\.weight, .*down\.bias\n"):
        checkpoint.load(two_checkpoints, model, None)


def test_equal_shapes_with_other_settings_are_refused(two_checkpoints: Path) -> None:
    model, _ = build(0, seed=2)
    with pytest.raises(InputError, match="rotary_base is None in the checkpoint, 10000 in"):
        checkpoint.load(two_checkpoints, model, None, architecture=ARCHITECTURE | {"rotary_base": 10000})


def test_other_tokenizer_is_refused(two_checkpoints: Path) -> None:
    model, _ = build(0, seed=2)
    with pytest.raises(InputError, match="another tokenizer"):
        checkpoint.load(two_checkpoints, model, None, tokenizer="xyz")


# Full disks and failing ranks


@ranks(2)
def save_with_a_limit_on_rank_one(folder: Path) -> None:
    model, optimizer = build(3, seed=1)
    train(model, optimizer, 1)
    checkpoint.save(folder, model, optimizer, state_at(1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(InputError) as error:
            checkpoint.save(folder, model, optimizer, state_at(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"cannot save in {folder} (rank 1): File too large" in str(error.value)
    assert "needs" in str(error.value) and "are free" in str(error.value)
    dist.barrier()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    checkpoint.save(folder, model, optimizer, state_at(2))  # and the ranks still work together
    assert checkpoint.choose(folder).name == "iter_0000002"


def test_full_disk_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    save_with_a_limit_on_rank_one(folder=tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@ranks(2)
def fill_the_disk(folder: Path) -> None:
    model, optimizer = build(3, seed=1)
    with pytest.raises(InputError, match="cannot save.*: No space left on device. The checkpoint"):
        for iteration in range(1, 100):
            train(model, optimizer, 1)
            checkpoint.save(folder, model, optimizer, state_at(iteration))
    assert iteration > 1
    assert checkpoint.load(folder, model, optimizer).iteration == iteration - 1
    assert names(folder) == [f"iter_{number:07d}" for number in range(1, iteration)]


def test_disk_that_fills_up_while_writing(small_disk: Path) -> None:
    fill_the_disk(folder=small_disk)


@ranks(2)
def save_something_large(folder: Path) -> None:
    model = nn.Linear(300, 300)  # 360 kB
    with pytest.raises(InputError) as error:
        checkpoint.save(folder, model, None, state_at(1))
    assert "too little space left" in str(error.value) and "361,200 bytes" in str(error.value)
    assert names(folder) == []


def test_space_is_checked_before_writing(small_disk: Path) -> None:
    save_something_large(folder=small_disk)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model, optimizer = build(0, seed=1)
    with pytest.raises(InputError, match="cannot save in .*file"):
        checkpoint.save(tmp_path / "file" / "save", model, optimizer, state_at(1))


@ranks(2)
def fail_on_rank_one(folder: Path) -> None:
    model, optimizer = build(3, seed=1)
    if dist.get_rank() == 1:
        model.state_dict = None  # a mistake of ours, on one rank only
    with pytest.raises((TypeError, RuntimeError), match="'NoneType' object is not callable"):
        checkpoint.save(folder, model, optimizer, state_at(1))


def test_error_on_one_rank_reaches_all(tmp_path: Path) -> None:
    fail_on_rank_one(folder=tmp_path)
