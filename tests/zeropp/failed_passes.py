"""The mark of tests that go on after a pass that failed, which FSDP2 can do since torch 2.13."""

import pytest
from torch.distributed.fsdp import FSDPModule

GOES_ON = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="no pass follows a failed one before 2.13"
)
