"""Counts what executes of ours from argv to the first gather of weights of a training run.

    torchrun --nproc-per-node 2 tests/path_to_the_wire.py FLAGS     (those of pretrain_gpt.py)

Rank 0 prints JSON: how many functions execute, of how many files, and which, in the order in which
they are first called. Functions that dataclasses generate, and what runs at import, do not count.
"""

import json
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

from megatron_zpp.commands.pretrain import main
from megatron_zpp.train import pretrain  # noqa: F401  (what runs at import does not count)
from zeropp.wire.collectives import WeightGather

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(str(ROOT / package) + os.sep for package in ("zeropp", "megatron_zpp"))
NAMELESS = ("<module>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class CalledFunctions:
    """The functions of ours that have been called."""

    def __init__(self) -> None:
        self._seen: dict[CodeType, None] = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; end the process at the first gather."""
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        self._seen.setdefault(frame.f_code)
        if frame.f_code is WeightGather.__call__.__code__:
            sys.setprofile(None)
            self._report()
            os._exit(0)

    def _report(self) -> None:
        named = [each for each in self._seen if each.co_name not in NAMELESS and _is_function(each)]
        files = list(dict.fromkeys(each.co_filename for each in named))
        if os.environ["RANK"] == "0":
            names = [f"{_shown(each.co_filename)}: {each.co_qualname}" for each in named]
            counts = {"functions": len(named), "files": len(files)}
            print(json.dumps({**counts, "path": names}), flush=True)


def _is_function(code: CodeType) -> bool:
    """Whether code is a function's, and not the body of a class."""
    return bool(code.co_flags & 1)  # CO_OPTIMIZED


def _shown(file: str) -> str:
    return os.path.relpath(file, ROOT)


if __name__ == "__main__":
    sys.setprofile(CalledFunctions().note)
    sys.exit(main(sys.argv[1:], "pretrain_gpt.py"))
