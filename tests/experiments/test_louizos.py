"""The LeNets shrunk and packed: what was recorded, and what training from scratch gives."""

import json
from pathlib import Path

import pytest

from experiments import louizos, trainings
from experiments.runner import experiments, finished, result_path
from tests.experiments.test_functions import TINY, few_images

ROOT = Path(__file__).parents[2]
KNOWN = experiments(ROOT / "experiments")


def result(name):
    path = result_path(KNOWN[name], ROOT / "results")
    assert finished(KNOWN[name], path)  # with the arguments of the description
    return json.loads(path.read_text())["runs"][0]


def test_recorded_results_meet_the_bounds():
    run = result("louizos/lenet300")
    figures, times = run["figures"], run["latency"]
    assert figures["times fewer weights"] >= 60
    assert figures["error of the small net, %"] <= 1.9
    assert figures["times fewer bytes"] >= 180
    assert abs(figures["error of the file, %"] - figures["error of the small net, %"]) <= 0.1
    assert times["256"]["dense"] >= 4 * times["256"]["chosen"]
    assert times["1"]["dense"] >= 1.5 * times["1"]["chosen"]
    times = result("louizos/lenet5-channels")["latency"]["256"]  # also in onnxruntime
    assert times["dense"] >= 3 * times["chosen"]
    assert times["dense"] >= 8 * times["onnx small"]


@pytest.mark.slow
def test_latencies_and_layers_are_measured(monkeypatch):
    monkeypatch.setattr(trainings, "load_images", few_images)
    found = louizos.packed_bytes(seed=1, latency=True, **TINY["packed_bytes"])
    for times in found["latency"].values():
        assert set(times) == {"dense", "small", "chosen", "onnx dense", "onnx small"}
        assert min(times.values()) > 0
    assert found["layers"]["dense"]["1"] == {"weights": 235_200, "inputs": 784, "outputs": 300}
    assert found["figures"]["times faster in torch, batches of 256"] > 0
    assert json.loads(json.dumps(found)) == found
