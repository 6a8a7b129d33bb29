"""A rank of the endurance job: pretrain_gpt.py's program, after it has said which process it is."""

import os
import sys
from pathlib import Path

from benchmarks.shared.result import write_text
from megatron_zpp.commands.pretrain import main
from zeropp.ranks.exit import exit_process


def pid_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its process id."""
    return folder / f"rank{rank}.pid"


if __name__ == "__main__":
    write_text(pid_file(Path(sys.argv[1]), int(os.environ["RANK"])), str(os.getpid()))
    exit_process(main(sys.argv[2:]))
