import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:  # whose import takes seconds
        torch.compiler.reset()
