"""Timing of models is short, except for tests of the timing itself."""

import pytest

from vardrop.compression import probes


@pytest.fixture(autouse=True)
def _short_timing(request, monkeypatch):
    if request.module.__name__.rpartition(".")[2] != "test_sparse":
        monkeypatch.setattr(probes, "_BUDGET", 0.0)
