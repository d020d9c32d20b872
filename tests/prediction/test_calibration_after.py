"""Calibration after the fact: the temperature is found, the coverage is what is promised."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import vardrop as vd
from vardrop.errors import VardropError
from vardrop.metrics import ece, nll
from vardrop.prediction import Prediction, apply_temperature, conformal, fit_temperature, predict
from vardrop.prediction.stream import Reduction


def overconfident(rows: int, seed: int, factor: float = 3.0) -> tuple[Prediction, Tensor]:
    """Logits `factor` times too large, with classes from the true ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 4, generator=generator)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    reduction = Reduction("categorical", 0.0, 0)
    reduction.add(factor * logits.unsqueeze(0))
    return reduction.result(), y


def test_the_temperature_is_the_minimum_of_the_nll() -> None:
    p, y = overconfident(5000, seed=0)
    found = fit_temperature(p, y)
    reference = minimize_scalar(
        lambda t: float(nll(apply_temperature(p.probs.double(), t), y)), bounds=(0.1, 10),
        method="bounded", options={"xatol": 1e-8},
    )  # fmt: skip
    assert found == pytest.approx(reference.x, rel=1e-4)
    assert found == pytest.approx(3.0, rel=0.1)


def test_scaling_mends_the_calibration_of_other_data() -> None:
    found = fit_temperature(*overconfident(5000, seed=0))
    p, y = overconfident(5000, seed=1)
    assert ece(apply_temperature(p.probs, found), y) < 0.3 * ece(p.probs, y)


def test_certain_classes_stay_in_range() -> None:
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert torch.isfinite(apply_temperature(probs, 5.0)).all()
    p, _ = overconfident(50, seed=0)
    assert fit_temperature(p, p.probs.argmax(1)) < 0.01  # never wrong: as cold as it gets


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_conformal_sets_cover_as_promised(level: float) -> None:
    fresh, y = overconfident(400, seed=0)
    covered, sizes = [], []
    for seed in range(1, 201):
        rule = conformal(*overconfident(100, seed), level)
        inside = rule.classes(fresh)
        covered.append(float(inside.gather(1, y.unsqueeze(1)).float().mean()))
        sizes.append(float(inside.float().sum(1).mean()))
    mean = sum(covered) / len(covered)
    # Over calibration sets the coverage is at least the level; the test rows add their own error.
    error = math.sqrt(level * (1 - level) * (1 / 400 + 1 / (200 * 100)))
    assert mean > level - 5 * error
    assert mean < level + 1 / 101 + 5 * error
    assert max(sizes) <= 4


@pytest.mark.parametrize("noise_std", [0.1, 1.0])
def test_conformal_intervals_cover_whatever_the_net_believes(noise_std: float) -> None:
    torch.manual_seed(0)
    net = vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop())
    x = torch.randn(2100, 2)
    y = net.eval()(x).detach() + 0.5 * torch.randn(2100, 1)
    options = {"likelihood": "gaussian", "noise_std": noise_std, "seed": 0}
    first, rest = predict(net, x[:100], **options), predict(net, x[100:], **options)
    lower, upper = conformal(first, y[:100], 0.9).interval(rest)
    inside = float(((y[100:] >= lower) & (y[100:] <= upper)).float().mean())
    # Beta(91, 10) for the coverage of 100 rows, and the binomial error of 2000.
    assert abs(inside - 0.9) < 5 * math.sqrt(0.09 / 101 + 0.09 / 2000)


def test_too_few_rows_give_the_whole_set() -> None:
    rule = conformal(*overconfident(5, seed=0), 0.99)
    assert math.isinf(rule.quantile)
    assert rule.classes(overconfident(3, seed=1)[0]).all()


def test_bad_input_is_refused() -> None:
    p, y = overconfident(20, seed=0)
    with pytest.raises(VardropError, match="`temperature` to be positive, but got 0"):
        apply_temperature(p.probs, 0.0)
    with pytest.raises(VardropError, match="classes from 0 to 3, but got 9"):
        fit_temperature(p, torch.full((20,), 9))
    with pytest.raises(VardropError, match="classes from 0 to 3, but got 9"):
        conformal(p, torch.full((20,), 9))
    with pytest.raises(VardropError, match="`level` to lie between"):
        conformal(p, y, 1.5)
    with pytest.raises(VardropError, match="regression for `interval`, but got classes"):
        conformal(p, y).interval(p)
    net, x = vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop()), torch.ones(3, 2)
    values = predict(net, x, likelihood="gaussian", noise_std=1.0)
    with pytest.raises(VardropError, match=r"shape \(3, 1\), but got \(3,\)"):
        conformal(values, torch.zeros(3))
    certain = predict(net, x, mode="mean", likelihood="gaussian")
    with pytest.raises(VardropError, match="a positive `std` in every row"):
        conformal(certain, torch.zeros(3, 1))
    with pytest.raises(VardropError, match="but got likelihood='bernoulli'"):
        conformal(predict(net, x, likelihood="bernoulli"), torch.zeros(3, 1))
