"""Timing of models is short."""

import pytest

from vardrop.compression import probes


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch):
    monkeypatch.setattr(probes, "_BUDGET", 0.0)
