"""The recipes for clusters ask for runs that the programs accept. Ray's is run by hand only."""

import re
import subprocess
from pathlib import Path

import yaml

from tests.documents import problem

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "examples" / "cluster"
PRINT = '#!/bin/sh\nprintf "%s\\0" torchrun "$@"\n'


def words_of(script: str, folder: Path, **variables: str) -> list[str]:
    """The command that a script starts with torchrun."""
    program = folder / ".venv" / "bin" / "torchrun"
    program.parent.mkdir(parents=True)
    program.write_text(PRINT)
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    command = ["bash", "-euc", script]
    options = {"cwd": folder, "env": path | variables, "text": True, "timeout": 60}
    return subprocess.run(command, check=True, capture_output=True, **options).stdout.split("\0")[
        :-1
    ]


def test_every_pod_of_the_jobset_starts_torchrun_and_meets_in_the_first(tmp_path):
    jobset = yaml.safe_load((CLUSTER / "kubernetes_jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    words = words_of(container["args"][0], tmp_path)
    name = jobset["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert f"{name}-{job['name']}-0-0.{name}:{port}" in words
    assert int(words[words.index("--nnodes") + 1]) == pods["completions"] == pods["parallelism"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(words[words.index("--nproc-per-node") + 1]) == gpus
    assert problem(words) is None
    volumes = {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def test_every_machine_of_the_skypilot_task_starts_torchrun(tmp_path):
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    place = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    place |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    words = words_of(task["run"], tmp_path, **place)
    assert words[words.index("--master-addr") + 1] == "10.0.0.1"
    assert words[words.index("--node-rank") + 1] == "1" and task["num_nodes"] == 2
    assert problem(words) is None
    assert words[words.index("--save") + 1] in task["file_mounts"]
    assert problem(task["setup"].split()) is None


def test_the_image_is_made_of_files_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert {"csrc", "zeropp", "megatron_zpp", "pyproject.toml", "setup.py"} <= {*sources}
    assert [name for name in sources if not (ROOT / name).exists()] == []
