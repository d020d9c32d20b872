"""Ensembles: a predictor whose draws are its members."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused


def members(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(count)]
    return [net.eval() for net in nets]


def test_plain_members_are_averaged_in_probability() -> None:
    nets, x = members(), torch.randn(5, 4)
    p = vd.Ensemble(nets)(x)
    outputs = torch.stack([net(x) for net in nets]).detach()
    torch.testing.assert_close(p.probs, outputs.softmax(2).mean(0))
    torch.testing.assert_close(p.draws, outputs)


def test_noisy_and_plain_members_have_the_same_weight() -> None:
    plain, other, base = members()
    noisy = vd.convert(other, vd.bayes_by_backprop(log_sigma2=-2.0))
    x = torch.randn(5, 4)
    p = vd.Ensemble([plain, noisy, base], 3000, likelihood=vd.Values())(x, seed=0)
    assert len(p.draws) == 3000
    alone = vd.predict(noisy, x, 3000, likelihood=vd.Values(), seed=1)
    expected = (plain(x) + base(x) + alone.mean) / 3
    error = alone.std / 1000**0.5
    assert ((p.mean - expected).abs() / error).max() < 6  # of 15 comparisons, 3e-8 together


def test_members_stay_as_they_are() -> None:
    nets = [net.train() for net in members()]
    vd.Ensemble(nets)(torch.randn(2, 4))
    assert all(net.training for net in nets)


def test_it_is_calibrated_frozen_and_exported(tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    nets, x, y = members(), torch.randn(60, 4), torch.arange(60) % 3
    ensemble = vd.Ensemble(nets)
    likelihood = vd.calibrate(ensemble, x, y)
    rule = vd.conformal(vd.Ensemble(nets, likelihood=likelihood)(x), y)
    frozen = vd.freeze(vd.Ensemble(nets, likelihood=likelihood, conformal=rule))
    expected = frozen.outputs(x[:7])
    with torch.no_grad():
        for net in nets:
            net[0].weight.zero_()
    for found, wanted in zip(frozen.outputs(x[:7]), expected, strict=True):
        assert torch.equal(found, wanted)
    vd.export_onnx(frozen, tmp_path / "ensemble.onnx", x[:1])
    session = onnxruntime.InferenceSession(tmp_path / "ensemble.onnx")
    outputs = session.run(None, {"x": x[:7].numpy()})
    assert [o.name for o in session.get_outputs()] == list(frozen.output_names)
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(found), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("models", [[], 3, [1], nn.Linear(2, 2)])
def test_bad_members_are_refused(models) -> None:
    assert_refused("`models` to be a list of models", vd.Ensemble, models)
