"""Calibration: temperatures and widths of noise from held-out data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from vardrop._core.calls import LabelledData, labelled_batches
from vardrop._core.checks import check_number, check_type
from vardrop.likelihoods import Likelihood, Objective, resolve_likelihood
from vardrop.metrics.validate import check_probabilities
from vardrop.prediction.eval_copy import is_stochastic
from vardrop.prediction.prediction import Prediction
from vardrop.prediction.predictor import Mode, Predictor

_COLDEST, _HOTTEST, _BISECTIONS = 1e-3, 1e3, 80
_PENALTY, _WIDEST, _SECTIONS = 10.0, 7.0, 40  # of the log of a scale; sections end within 6e-8


def apply_temperature(probs: Tensor | Prediction, temperature: float) -> Tensor:
    """Raise class probabilities to the power 1/T and normalize them.

    Args:
        probs: class probabilities (N, C, ...). Or a prediction, whose log-probabilities are exact
            even if a probability is rounded to zero or one.
        temperature: T, for example from `fit_temperature`.

    Returns:
        Probabilities of the same shape.

    >>> import torch
    >>> apply_temperature(torch.tensor([[0.8, 0.2]]), 2.0)
    tensor([[0.6667, 0.3333]])
    """
    check_number("temperature", temperature, above=0)
    if isinstance(probs, Prediction):
        scaled = probs.likelihood.apply_temperature(probs.log_probs, temperature).exp()
        return scaled if scaled.shape == probs.probs.shape else scaled[..., 1]
    probs = check_probabilities("probs", probs)
    log_probs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    return torch.softmax(log_probs / temperature, 1)


def fit_temperature(p: Prediction, y: Tensor) -> float:
    """Find the temperature that minimizes the NLL of `apply_temperature(p, T)`.

    The NLL is convex in 1/T and its derivative, E_y log p - log p[y], increases with 1/T. Bisection
    finds its zero between 1/1000 and 1000. If there is none, the nearer end is returned.

    Args:
        p: a prediction for data that was not used for training.
        y: classes (N, ...), or zeros and ones. Targets of an ignored class have no effect.

    Returns:
        The temperature.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import fit_temperature, predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> p = predict(net, torch.randn(50, 4), samples=8)
    >>> fit_temperature(p, p.probs.argmax(1)) < 1
    True

    Guo et al. 2017, "On calibration of modern neural networks", sec. 4.2.
    """
    check_type("p", p, Prediction, "a prediction of vardrop.predict")
    logs = p.log_probs.double().clamp(min=torch.finfo(torch.float32).min)
    axis = p.likelihood.class_axis
    assert axis is not None
    p.likelihood.check_target(p.mean, y)
    which = p.likelihood.valid_mask(y)
    logs = logs.movedim(axis, -1)[which]  # (M, C)
    chosen = logs.gather(1, y[which].long().unsqueeze(1)).mean()
    low, high = math.log(1 / _HOTTEST), math.log(1 / _COLDEST)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        scaled = torch.softmax(logs * math.exp(middle), 1)
        rises = (scaled * logs).sum(1).mean() > chosen
        low, high = (low, middle) if rises else (middle, high)
    return math.exp(-0.5 * (low + high))


def calibrate(
    net: nn.Module | Objective,
    data: LabelledData,
    likelihood: Likelihood | None = None,
    samples: int = 32,
    seed: int | None = None,
    progress: bool | None = None,
) -> Likelihood:
    """The likelihood with the width of noise that fits held-out data best.

        min over c of  -sum_n log p(y_n | x_n; e^c) + 10 (log T)^2

    e^c multiplies the temperature T of classes or the standard deviation of values, in every draw.
    The second term is for classes only. It is a normal prior on log T around T = 1 and keeps few
    examples from deciding: a free temperature on 40 examples that are all classified right would go
    to zero. The width for values has no such prior, because its unit is arbitrary.

    Args:
        net: a noisy model, or an ELBO with it; a plain model, which predicts without draws; or a
            `Predictor` or `Ensemble`.
        data: inputs and targets that were not used for training, a pair (x, y) or batches of such
            pairs.
        likelihood: of the output; by default the likelihood of the ELBO, or `Categorical()`.
        samples: number of draws.
        seed: makes the draws repeatable.
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        The calibrated likelihood, to pass as `likelihood=` to `predict` or `freeze`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop())
    >>> x = torch.randn(200, 2)
    >>> y = net.eval()(x).detach() + 0.5 * torch.randn(200, 1)
    >>> found = vd.calibrate(net, (x, y), vd.Gaussian(std=0.1), seed=0)
    >>> bool((found.std - 0.5).abs() < 0.1)
    True

    Guo et al. 2017, "On calibration of modern neural networks", sec. 4.2 (the temperature).
    """
    batches = list(labelled_batches(data))
    x, y = [inputs for inputs, _ in batches], torch.cat([targets for _, targets in batches])
    predictor = net
    if not isinstance(predictor, Predictor):
        model, meaning = resolve_likelihood(net, likelihood)
        mode: Mode = "sample" if any(map(is_stochastic, model.modules())) else "mean"
        predictor = Predictor(net, samples, mode=mode, likelihood=meaning)
        predictor.is_kept = False
    p = predictor(x, seed, progress)
    p.likelihood.check_target(p.mean, y)
    return p.likelihood.scaled(math.exp(fit_log_scale([(p, y, 1.0)])))


def fit_log_scale(held_out: Sequence[tuple[Prediction, Tensor, Tensor | float]]) -> float:
    """The c of `calibrate` from predictions.

    Args:
        held_out: predictions with all their draws, each with its targets and their weights.

    Returns:
        The logarithm of the factor of the temperature or the standard deviation.
    """
    # A minimum is known to the root of the precision of its values.
    exact = [(replace(p, draws=p.draws.double()), y, w) for p, y, w in held_out]

    likelihood = held_out[0][0].likelihood
    start = math.log(getattr(likelihood, "temperature", 1.0))
    penalty = _PENALTY if hasattr(likelihood, "temperature") else 0.0

    @cache
    def loss(c: float) -> float:
        logs = ((p.rescale(math.exp(c)).log_prob(y) * w).sum() for p, y, w in exact)
        return penalty * (c + start) ** 2 - float(sum(logs))

    low, high, ratio = -_WIDEST, _WIDEST, (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    for _ in range(_SECTIONS):
        if loss(left) < loss(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
    return 0.5 * (low + high)
