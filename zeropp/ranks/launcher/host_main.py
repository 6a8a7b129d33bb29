"""The program that a job over several machines runs on each: `zeropp`, as long as stdin is open.

Standard input is the connection to the process that started the job. When it is closed, `zeropp`
and its ranks end as after SIGTERM.
"""

import os
import signal
import sys
import threading

from zeropp.ranks.launcher.command import main


def end_when_closed(descriptor: int) -> None:
    """Send SIGTERM to this process when nothing more can be read."""
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    connection = os.dup(0)  # ranks do not inherit it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=end_when_closed, args=(connection,), daemon=True).start()
    sys.exit(main())
