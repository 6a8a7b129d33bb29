"""Running a benchmark's module on several ranks of this machine, for what its rank 0 measured."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.shared.result import ROOT

ON_RANKS = "--on-ranks"  # a flag of every benchmark: the file for rank 0's answer


class RanksFailed(RuntimeError):
    """Ranks ended without an answer; their own messages are on standard error or in the text."""


def run_on_ranks(
    module: str,
    num_ranks: int,
    arguments: Sequence[str],
    *,
    ranks_per_node: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> object:
    """Run `python -m module ARGUMENTS --on-ranks FILE` on each rank; return rank 0's answer.

    `variables` are added to the environment. Raises RanksFailed if there is no answer.
    """
    launcher = [sys.executable, "-m", "zeropp.ranks.launcher", "--num_ranks", str(num_ranks)]
    launcher += ["--no_local_rank"]
    if ranks_per_node is not None:
        launcher += ["--ranks_per_node", str(ranks_per_node)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [*launcher, "--module", module, *arguments, ON_RANKS, str(answer)]
        environment = {**os.environ, **(variables or {})}
        done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, env=environment)
        if done.returncode != 0 or not answer.exists():
            raise RanksFailed(f"the ranks exited with status {done.returncode}")
        return json.loads(answer.read_text())
