"""Calibration after the fact, on top of any prediction: temperature scaling and conformal sets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vardrop.errors import VardropError
from vardrop.prediction.result import Interval, Prediction

_COLDEST, _HOTTEST, _BISECTIONS = 1e-3, 1e3, 80


def apply_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Class probabilities raised to 1/T and normalised; classes on axis 1.

    >>> import torch
    >>> apply_temperature(torch.tensor([[0.8, 0.2]]), 2.0)
    tensor([[0.6667, 0.3333]])
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise VardropError(f"Expected `temperature` to be positive, but got {temperature}.")
    return torch.softmax(_log(probs) / temperature, 1)


def fit_temperature(p: Prediction, y: Tensor) -> float:
    """The temperature that minimises the NLL of `apply_temperature(p.probs, T)` on held-out data.

    The NLL is convex in 1/T and its derivative, E_y log p - log p[y], rises with it, so bisection
    finds the minimum; where none lies between 1/1000 and 1000 the nearer end is returned.

    Args:
        p: the prediction on data that did not train the net.
        y: its classes (N,).

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import fit_temperature, predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> p = predict(net, torch.randn(50, 4), samples=8)
    >>> fit_temperature(p, p.probs.argmax(1)) < 1
    True

    Guo et al. 2017, "On calibration of modern neural networks", sec. 4.2.
    """
    p.log_prob(y)  # checks the classes
    logs = _log(p.probs.double())
    chosen = logs.gather(1, y.unsqueeze(1)).mean()
    low, high = math.log(1 / _HOTTEST), math.log(1 / _COLDEST)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        scaled = torch.softmax(logs * math.exp(middle), 1)
        rises = (scaled * logs).sum(1).mean() > chosen
        low, high = (low, middle) if rises else (middle, high)
    return math.exp(-0.5 * (low + high))


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


@dataclass(frozen=True)
class Conformal:
    """A split-conformal rule: the largest score that still belongs to the set.

    Classification: the set of classes with 1 - p <= quantile. Regression: mean +- quantile * std.
    """

    level: float
    quantile: float

    def classes(self, p: Prediction) -> Tensor:
        """The prediction sets of new rows, (N, C), True for the classes inside."""
        return 1 - p.probs <= self.quantile

    def interval(self, p: Prediction) -> Interval:
        """The prediction intervals of new rows."""
        if p.classifies:
            raise VardropError("Expected a regression for `interval`, but got classes.")
        half = self.quantile * p.std
        return Interval(p.mean - half, p.mean + half)


def conformal(p: Prediction, y: Tensor, level: float = 0.9) -> Conformal:
    """Fit sets or intervals that cover new targets with at least the given probability.

    P(y in set) >= level for rows exchangeable with the held-out ones, whatever the net: the bound
    is the ceil((n + 1) level)-th smallest score of n rows, 1 - p[y] or |y - mean| / std. Where n
    is too small for the level it is infinite, and the set holds everything.

    Args:
        p: the prediction on data that did not train the net.
        y: its targets: classes (N,), or values in the shape of `p.mean`.
        level: the coverage that is guaranteed on average over calibration and new data.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import conformal, predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> p = predict(net, torch.randn(50, 4), samples=8)
    >>> conformal(p, p.probs.argmax(1)).classes(p).shape
    torch.Size([50, 3])

    Vovk, Gammerman & Shafer 2005; Lei et al. 2018, "Distribution-free predictive inference for
    regression", sec. 2.2; Sadinle, Lei & Wasserman 2019, "Least ambiguous set-valued classifiers".
    """
    if not 0 < level < 1:
        raise VardropError(f"Expected `level` to lie between 0 and 1, but got {level}.")
    scores = _scores(p, y).flatten().double()
    rank = math.ceil((len(scores) + 1) * level)
    if rank > len(scores):
        return Conformal(level, math.inf)
    return Conformal(level, float(scores.kthvalue(rank).values))


def _scores(p: Prediction, y: Tensor) -> Tensor:
    if p.likelihood == "categorical":
        p.log_prob(y)  # checks the classes
        return 1 - p.probs.gather(1, y.unsqueeze(1)).squeeze(1)
    if p.classifies:
        raise VardropError(
            "Expected classes or values for `conformal`, but got likelihood='bernoulli'. "
            "Give the net two classes."
        )
    if y.shape != p.mean.shape:
        raise VardropError(
            f"Expected `y` to have shape {tuple(p.mean.shape)}, but got {tuple(y.shape)}."
        )
    if not bool((p.std > 0).all()):
        raise VardropError(
            "Expected a positive `std` in every row, but got 0. Pass noise_std= to predict."
        )
    return (y - p.mean).abs() / p.std
