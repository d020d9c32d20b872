import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
