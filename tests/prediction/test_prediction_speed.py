"""The memory that prediction promises, as a ratio in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "predict.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_draws() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "memory"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    print(run.stdout)
    assert json.loads(run.stdout)["ratio"] < 1.2
