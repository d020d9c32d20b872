"""The speed and memory that prediction promises, as ratios in one run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from experiments.trainings import lenet5, mlp

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "predict.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_predict", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, batch, faster",
    [("MLP", 256, 3.0), ("LeNet-5", 256, 3.0), ("MLP", 1, 3.0), ("LeNet-5", 1, 3.0)],
)
def test_prediction_is_faster_than_a_loop(
    benchmark: ModuleType, name: str, batch: int, faster: float
) -> None:
    build = {"MLP": lambda: mlp(784, 300, 100, 10), "LeNet-5": lenet5}[name]
    found = benchmark.speed(name, build, batch, rounds=3)
    print(json.dumps(found))
    assert found["faster than"]["loop of local reparameterisation"] > faster
    assert found["auto / better way"] < 1.15
    if batch > 1:
        assert found["forwards"]["moments"] < 4


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
