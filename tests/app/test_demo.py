"""The demo: accurate with a tenth of the weights, and a report at the end."""

import math

import pytest
import torch

import vardrop as vd
from vardrop.app.data.datasets import load_out_of_distribution
from vardrop.app.demo import main
from vardrop.app.runs import export_run, load_run
from vardrop.metrics import auroc, ece


def percent(cell):
    return float(cell.split("%")[0].split("(")[-1])


@pytest.mark.slow
def test_the_demo_prunes_and_stays_accurate(tmp_path, capsys):
    """And its net, as one ONNX file, tells digits from photographs as torch does."""
    table = main(tmp_path / "demo")
    names, accuracy, weights = (list(table.columns[i].cells) for i in (0, 1, 5))
    assert names == ["plain", "sparse VD", "pruned"]
    assert percent(accuracy[1]) >= 98.0
    assert percent(accuracy[2]) >= percent(accuracy[1]) - 0.5
    assert percent(weights[2]) <= 5.0
    run = load_run(tmp_path / "demo" / "sparse")
    assert run.results["ood"]["photos"]["auroc_entropy"] >= 0.95
    small = run.results["compression"]
    assert 20 * small["packed_bytes"] <= 4 * small["weights_before"]
    assert capsys.readouterr().out.rstrip().endswith(str(tmp_path / "demo" / "report.html"))
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000
    check_the_graph(run, tmp_path / "net.onnx")


def check_the_graph(run, path):
    """ECE and AUROC to three digits, by all draws in the file and by one pass of moments."""
    onnxruntime = pytest.importorskip("onnxruntime")
    digits, photos = run.data.test.x, load_out_of_distribution("photos", run.about.shape)
    frozen = vd.freeze(run.net.eval(), 32, mode="moments", likelihood=scaled(run))
    for mode, predict in {
        "functions": lambda x: run.predict(x, 32, draw="functions"),
        "moments": frozen,
    }.items():
        export_run(run, path, 32, mode=mode, outputs=("probs", "entropy"))
        session = onnxruntime.InferenceSession(path)
        found = [map(torch.tensor, session.run(None, {"x": x.numpy()})) for x in (digits, photos)]
        (probs, inside), (_, outside) = found
        p, q = predict(digits), predict(photos)
        here, there = ece(probs, run.data.test.y), ece(p.probs, run.data.test.y)
        assert here == pytest.approx(float(there), abs=5e-4)
        assert auroc(inside, outside) == pytest.approx(float(auroc(p.entropy, q.entropy)), abs=5e-4)


def scaled(run):
    likelihood = run.elbo.likelihood
    return likelihood if run.choice is None else likelihood.scaled(math.exp(run.choice.log_scale))
