"""The host memory that is available: of the machine, and under the limits of a container or job."""

from pathlib import Path

import pytest

from zeropp.ranks import host_memory

MIB = 2**20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with 64 MiB available, and no limits yet."""
    for name in ("MEMINFO", "PROCESS_CGROUPS", "CGROUPS"):
        monkeypatch.setattr(host_memory, name, tmp_path / name)
    (tmp_path / "MEMINFO").write_text(f"MemTotal: 9 kB\nMemAvailable: {64 * 1024} kB\n")


def limit(folder: Path, names: tuple[str, str, str], most: int | str, used: int, files: int = 0):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (most, used), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {files}\n")


def test_without_limits_it_is_the_memory_of_the_machine(tmp_path):
    assert host_memory.free_bytes() == 64 * MIB
    (tmp_path / "PROCESS_CGROUPS").write_text("0::/job\n")
    limit(tmp_path / "CGROUPS/job", V2, "max", 5 * MIB)
    assert host_memory.free_bytes() == 64 * MIB
    (tmp_path / "MEMINFO").unlink()
    assert host_memory.free_bytes() is None


def test_a_jobs_limit_holds_for_the_groups_in_it(tmp_path):
    (tmp_path / "PROCESS_CGROUPS").write_text("0::/job/step/task\n")
    limit(tmp_path / "CGROUPS/job/step/task", V2, "max", 5 * MIB)
    limit(tmp_path / "CGROUPS/job", V2, 40 * MIB, 30 * MIB, files=4 * MIB)
    assert host_memory.free_bytes() == 14 * MIB
    limit(tmp_path / "CGROUPS/job", V2, 40 * MIB, 41 * MIB)
    assert host_memory.free_bytes() == 0


def test_version_1_and_a_container_that_shows_its_own_group_only(tmp_path):
    (tmp_path / "PROCESS_CGROUPS").write_text("4:cpu,memory:/docker/1f:2\n3:cpu:/\n0::/\n")
    limit(tmp_path / "CGROUPS/memory", V1, 16 * MIB, 10 * MIB, files=MIB)
    assert host_memory.free_bytes() == 7 * MIB
