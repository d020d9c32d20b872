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

ROOT = Path(__file__).parents[1]
THREADS, INPUTS = 8, 16


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
    """A run that is killed many times ends with the same files as one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "tests.app.runs.killed", folder, str(kills)]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        left = [p.name for p in Path(folder).rglob("*.new")]
    return {
        "kills": kills,
        "same": done.returncode == 0,
        "temporary files left": len(left),
        "seconds": round(time.perf_counter() - start),
        "last line": lines[-1] if lines else "",
    }


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
