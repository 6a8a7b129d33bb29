"""The marks of tests that need a GPU: they are skipped, with the reason, where there is none."""

import pytest
import torch

GPU = "cuda"
MARKS = [  # `pytestmark` of a file
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
