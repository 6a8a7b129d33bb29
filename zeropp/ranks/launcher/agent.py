"""The ranks of this machine, run once by PyTorch's elastic agent."""

import dataclasses
import os
import sys
import tempfile
import uuid
from contextlib import nullcontext
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeropp.ranks.launcher.failed_rank import EndedChildren, report_failure
from zeropp.ranks.launcher.meeting_point import MEET_SECONDS, MeetingPoint

SAVE_SECONDS = 300  # between SIGINT or SIGTERM and SIGKILL, for the ranks to save
LOCALHOST = "127.0.0.1"
LOCAL_RANK = "${local_rank}"  # the agent replaces it with the number
RANK_SCRIPT = Path(__file__).with_name("rank_main.py")


def run_ranks(command: list[str], num_ranks: int, meeting: MeetingPoint | None) -> int:
    """Run a command on each rank of this machine; return 0, or the exit code of a failed rank.

    `meeting`: where other machines' launchers are met; None: there are none. Raises NetworkError if
    they are not.
    """
    program, *arguments = command
    ended = EndedChildren()
    with (
        tempfile.TemporaryDirectory(prefix="zeropp-") as folder,
        nullcontext() if meeting is None else meeting.held(),
    ):
        try:
            elastic_launch(_launch_config(num_ranks, folder, meeting), program)(*arguments)
        except ChildFailedError as error:
            return report_failure(error.failures, ended.times)
    return 0


def rank_command(
    program: list[str], num_cores: int, ranks_per_node: int | None, tells_local_rank: bool
) -> list[str]:
    """Return the command line of each rank; `env` overrides the node size that the agent sets.

    `num_cores` of its own to which each rank is pinned; 0: none. With `tells_local_rank`, the
    program gets `--local_rank=N` before its arguments.
    """
    begin = 2 if program[0] == "--module" else 1
    if tells_local_rank:
        program = [*program[:begin], f"--local_rank={LOCAL_RANK}", *program[begin:]]
    command = [
        *(sys.executable, "-u", str(RANK_SCRIPT)),
        *(str(os.getpid()), str(num_cores), LOCAL_RANK),
        *program,
    ]
    if ranks_per_node is None:
        return command
    return ["/usr/bin/env", f"LOCAL_WORLD_SIZE={ranks_per_node}", *command]


def _launch_config(num_ranks: int, folder: str, meeting: MeetingPoint | None) -> LaunchConfig:
    """Return the settings of the agent: one attempt, one machine and a free port, or `meeting`.

    `folder` is for the agent's own files, which it does not remove.
    """
    supported = {field.name for field in dataclasses.fields(LaunchConfig)}
    settings = {}
    if "shutdown_timeout" in supported:  # torch 2.11 always waits 30 s
        settings["shutdown_timeout"] = SAVE_SECONDS
    if meeting is None:
        settings |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"{LOCALHOST}:0"}
        settings |= {"run_id": uuid.uuid4().hex, "local_addr": LOCALHOST}
    else:
        settings |= {"rdzv_backend": "static", "rdzv_endpoint": meeting.endpoint}
        settings |= {"rdzv_configs": {"rank": meeting.node, "timeout": MEET_SECONDS}}
        settings |= {"run_id": "zeropp"}  # the same on every machine
    num_nodes = 1 if meeting is None else meeting.num_nodes
    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_ranks,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **settings,
    )
