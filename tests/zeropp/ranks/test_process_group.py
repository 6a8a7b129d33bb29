"""The backend of the collectives, and how a process leaves its group."""

import subprocess
import sys

import pytest
import torch

from zeropp.errors import InputError
from zeropp.ranks.process_group import GLOO_AND_NCCL, choose_backend, pick_device
from zeropp.ranks.topology import Environment


def environment(world_size: int, **fields: int) -> Environment:
    return Environment(world_size=world_size, **fields)


@pytest.mark.parametrize(
    ("ranks", "machines", "num_gpus", "requested", "expected"),
    [
        (4, 1, 0, None, "gloo"),
        (4, 1, 4, None, GLOO_AND_NCCL),
        (16, 2, 8, None, GLOO_AND_NCCL),
        (4, 1, 1, None, "gloo"),  # NCCL refuses two ranks on one GPU
        (4, 1, 1, "nccl", GLOO_AND_NCCL),  # asked for: NCCL 2.30 can be told to allow it
        (4, 1, 4, "gloo", "gloo"),
    ],
)
def test_backend(ranks, machines, num_gpus, requested, expected):
    assert choose_backend(environment(ranks, machines=machines), num_gpus, requested) == expected


def test_ranks_that_share_a_gpu_keep_it_when_a_mesh_is_made(monkeypatch):
    """A mesh sets the device of the local rank, unless CUDA is initialized."""
    calls = []
    for name, value in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("initialized"))
    device = pick_device(environment(4, rank=3, local_rank=3))
    assert calls == [device, "initialized"] and device == torch.device("cuda", 1)


def test_nccl_without_a_gpu():
    with pytest.raises(InputError, match="nccl needs a GPU"):
        choose_backend(environment(2), 0, "nccl")


def test_nodes_smaller_than_the_machine_do_not_hide_how_many_ranks_it_has():
    nodes_of_two = Environment(rank=1, world_size=4, local_rank=1, local_world_size=2, machines=1)
    assert choose_backend(nodes_of_two, 2, None) == "gloo"


SCRIPT = """
import atexit, logging, sys, threading
from zeropp.ranks.exit import exit_process
atexit.register(print, "Python was finalized")
threading.Thread(target=threading.Event().wait).start()  # would be waited for, forever
logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
print("all of it")
logging.warning("and this")
exit_process(3)
"""


def test_exit_process_flushes_output_and_waits_for_no_thread():
    done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "all of it\nand this\n")


STORE_ENDS = """
import os, threading
from datetime import timedelta
import torch, torch.distributed as dist
from zeropp.errors import NetworkError
from zeropp.ranks.process_group import start_process_group
from zeropp.ranks.topology import Environment

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
os.environ |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}

def end_store():
    global server
    server.wait(["attempts/announced/1"])
    del server

threading.Thread(target=end_store).start()
try:
    start_process_group(Environment.read(), torch.device("cpu"), timedelta(seconds=30))
except NetworkError as error:
    print(error, flush=True)
"""


def test_a_rank_that_has_lost_the_store_says_so():
    done = subprocess.run([sys.executable, "-c", STORE_ENDS], capture_output=True, text=True)
    assert done.stdout.startswith("rank 1 on ") and "has lost the store" in done.stdout, done.stderr
