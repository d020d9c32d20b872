"""A file of `export_onnx` answers in a real browser, by onnxruntime-web, as torch does."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.app.report import browser
from tests.running import ROOT, serve

NPM = shutil.which("npm")
PAGE = ROOT / "examples" / "browser"
CACHE = Path.home() / ".cache" / "vardrop-browser"
pytestmark = pytest.mark.skipif(not (browser.CHROMIUM and NPM), reason="needs chromium and npm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page with the runtime that its package.json names, as `npm install` puts it there."""
    version = json.loads((PAGE / "package.json").read_text())["dependencies"]["onnxruntime-web"]
    runtime = CACHE / version
    if not (runtime / "node_modules" / "onnxruntime-web").is_dir():
        runtime.mkdir(parents=True, exist_ok=True)
        shutil.copy(PAGE / "package.json", runtime)
        command = [NPM, "install", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=runtime, capture_output=True, timeout=240, check=False)
        if done.returncode:
            shutil.rmtree(runtime)
            pytest.skip(f"onnxruntime-web cannot be installed: {done.stderr[-200:]!r}")
    found = tmp_path_factory.mktemp("page")
    shutil.copy(PAGE / "index.html", found)
    (found / "node_modules").symlink_to(runtime / "node_modules")
    return found


@pytest.mark.parametrize("mode", ["moments", "sample"])
def test_a_page_answers_with_its_doubt(mode, folder, tmp_path):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net = vd.convert(net, vd.sparse_vd(log_sigma2=-2.0)).eval()
    predictor, x = vd.freeze(net, mode=mode, samples=500), torch.randn(3, 4)
    vd.export_onnx(predictor, x, folder / "model.onnx", outputs=("probs", "epistemic"))
    with serve(folder) as address, browser.page(tmp_path) as tab:
        tab.open(f"{address}index.html", 900)
        found = tab.evaluate(f"answer({json.dumps(x.tolist())})")
        tab.evaluate(f"document.getElementById('rows').value = '{json.dumps(x.tolist())}'")
        tab.evaluate("ask.onclick()")
        shown = tab.evaluate("[...document.querySelectorAll('td')].map(c => c.textContent)")
        assert tab.evaluate("state.textContent") == ""
    p, probs = predictor(x, seed=0), np.array(found["probs"]).reshape(3, 3)
    assert len(shown) == 6
    if mode == "moments":
        assert np.allclose(probs, p.probs, atol=1e-5)
        assert np.allclose(found["epistemic"], p.epistemic, atol=1e-5)
        assert np.allclose([float(v) for v in shown[0].split()], p.probs[0], atol=1e-4)
    else:  # other draws of the same distribution
        z = np.abs(probs - p.probs.numpy()) / (p.standard_error.numpy() * np.sqrt(2))
        assert z.max() < 6
