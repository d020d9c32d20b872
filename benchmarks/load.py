"""Load: many predictions from several threads, requests to an exported file, killed runs.

    python benchmarks/load.py --calls 10000 --requests 1000 --kills 100

Every answer is compared with the first one. It prints one line of JSON per part.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

import vardrop as vd
from vardrop._core.files import read_tensors
from vardrop.app.store import read_history

ROOT = Path(__file__).parents[1]
THREADS, INPUTS = 8, 16
PER_RUN = 20  # kills, which a short run lives long enough for
FILES = ("checkpoint.safetensors", "best.safetensors", "choice.safetensors", "results.json")


def memory():
    """The memory of this process now, in MB, if the system tells."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return vd.convert(net, vd.bayes_by_backprop()).eval()


def repeat(answer, expected, calls):
    """Call from several threads; return the figures."""
    before_second_half = [0.0]

    def one(number):
        if number == calls // 2:
            before_second_half[0] = memory()
        try:
            return bool(torch.equal(answer(number % INPUTS), expected[number % INPUTS]))
        except Exception as error:  # any error is a result of this test
            return repr(error)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(one, range(calls)))
    seconds = time.perf_counter() - start
    return {
        "calls": calls,
        "threads": THREADS,
        "different": sum(r is False for r in results),
        "errors": sum(isinstance(r, str) for r in results),
        "calls per second": round(calls / seconds),
        "MB after half": round(before_second_half[0], 1),
        "MB at the end": round(memory(), 1),
    }


def predict_load(calls):
    net, inputs = model(), torch.randn(INPUTS, 4, 8)
    predictor = vd.freeze(net, samples=4)
    expected = [predictor(x, seed=i).probs for i, x in enumerate(inputs)]
    return repeat(lambda i: predictor(inputs[i], seed=i).probs, expected, calls)


def onnx_load(calls):
    import onnxruntime

    predictor = vd.freeze(model(), mode="moments", samples=16)
    inputs = torch.randn(INPUTS, 4, 8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        vd.export_onnx(predictor, inputs[0], path)
        session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name

    def answer(i):
        return torch.from_numpy(session.run(None, {name: inputs[i].numpy()})[0])

    return repeat(answer, [answer(i) for i in range(INPUTS)], calls)


def killed_runs(kills):
    """Runs that are killed often, each compared with a run that was not; their sum."""
    runs = [killed_run(min(PER_RUN, kills - k)) for k in range(0, kills, PER_RUN)]
    return {name: sum(run[name] for run in runs) for name in runs[0]} | {"runs": len(runs)}


def killed_run(kills):
    """The figures of one run that is killed many times."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        script = ROOT / "tests" / "app" / "runs" / "killed.py"
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), folder, str(kills)]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        histories = [[{**r, "seconds": 0} for r in read_history(d)] for d in (whole, broken)]
        return {
            "kills": kills,
            "different places": int(done.stdout.split()[-3]),
            "different files": sum(content(whole / n) != content(broken / n) for n in FILES),
            "different histories": int(histories[0] != histories[1]),
            "temporary files left": len(list(Path(folder).rglob("*.new"))),
            "seconds": round(time.perf_counter() - start),
        }


def content(path):
    """The tensors and values of a file, or its text."""
    if path.suffix == ".json":
        return path.read_text()
    tensors, values = read_tensors(path)
    return {name: tensor.tolist() for name, tensor in tensors.items()}, values


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    parts = {
        "predict": lambda: predict_load(options.calls),
        "onnx": lambda: onnx_load(options.requests),
        "kills": lambda: killed_runs(options.kills),
    }
    for name, part in parts.items():
        print(json.dumps({"part": name, **part()}), flush=True)


if __name__ == "__main__":
    main()
