"""How a process ends that may be one of several ranks; imports no torch."""

import logging
import os
import sys
from typing import NoReturn

# Exit status of a rank that ends because another one failed: launchers then look for that one.
OTHER_RANK_FAILED = 75  # EX_TEMPFAIL of sysexits.h


def exit_process(status: int) -> NoReturn:
    """Flush logs and streams, and exit without finalizing the interpreter.

    A thread of gloo may still hold the last reference to a tensor, and in PyTorch 2.13 some groups
    outlive `destroy_process_group`. If the thread released it while Python is finalized, the
    process would end with SIGABRT. `atexit` handlers are not called.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
