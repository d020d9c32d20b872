import sys

import pytest
import torch

from vardrop._core.values import _TYPES


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    for name in [n for n, kind in _TYPES.items() if "<locals>" in kind.__qualname__]:
        del _TYPES[name]  # of classes that a test made
    if "torch._dynamo" in sys.modules:  # whose import takes seconds
        torch.compiler.reset()
