"""What ends a process at a signal."""

import pickle
import signal

from megatron_zpp.train.stop import Interrupted


def test_an_interruption_can_be_sent_to_other_ranks():
    """As torch's distributed checkpoint does with what is raised while it plans a save."""
    received = pickle.loads(pickle.dumps(Interrupted(signal.SIGTERM)))
    assert received.code == 143 and str(received) == "stopped by SIGTERM"
