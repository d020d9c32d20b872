"""A trained net made to know how sure it is: noise fine-tuned, or laid around the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from vardrop._core.calls import tensors_in
from vardrop._core.checks import check_integer, check_net, check_number, check_type
from vardrop._core.errors import NotFiniteError, VardropError
from vardrop.compression import finishing
from vardrop.likelihoods import Categorical, Likelihood
from vardrop.noisy import has_noise, mode_of, noisy_modules, noisy_weights
from vardrop.objective import ELBO, parameter_groups
from vardrop.posteriors import AdditiveGaussian
from vardrop.prediction import calibrate, predict, unlabelled_kappa
from vardrop.tuning.noise_check import NoiseCheck

Batches = Iterable[tuple[Any, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]
_QUIET = 50.0  # by how much less variance a trained net starts, of multiplicative noise
_NOISE_RATE = 100.0  # times the learning rate of the weights
_PRECISIONS = tuple(10.0**k for k in range(-2, 7))  # of the prior; validation data choose


@overload
def fine_tune(
    net: nn.Module, data: Batches, loss: Loss, optimizer: torch.optim.Optimizer, epochs: int = ...
) -> nn.Module: ...
@overload
def fine_tune(
    net: nn.Module,
    data: Batches,
    *,
    epochs: int = ...,
    likelihood: Likelihood | None = ...,
    validation: tuple[Any, Tensor] | None = ...,
    beta: float = ...,
    lr: float = ...,
) -> ELBO: ...
def fine_tune(
    net: nn.Module,
    data: Batches,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    epochs: int | None = None,
    *,
    likelihood: Likelihood | None = None,
    validation: tuple[Any, Tensor] | None = None,
    beta: float = 0.01,
    lr: float = 1e-3,
) -> nn.Module:
    """Train a net that was trained before, in place: a pruned one, or one made noisy.

    A plain net is trained by `loss` with `optimizer`, for one epoch by default; weights at zero
    stay at zero, and the net is returned.

    A noisy net is trained by its ELBO, for three epochs by default: Adam, one cycle of the learning
    rate, and 0.01 of the KL, the whole of which costs likelihood where weights are many and epochs
    few. The noise has a learning rate of its own, 100 times `lr`: log sigma^2 has several units to
    go in few steps. Rates of multiplicative noise that are still where the recipe put them start
    at a fiftieth: recipes start as training from scratch needs it, and a trained net would unlearn.
    With `validation`, the width of the likelihood's noise is fitted there at the end (`calibrate`).
    The ELBO is returned: `predict(elbo, x)` knows net, likelihood and temperature.

    Args:
        net: a plain net, such as the result of `shrink`, or a net from `convert`.
        data: batches (inputs, targets), read once per epoch; for a noisy net once more, to count.
        loss: of a plain net, such as `torch.nn.functional.cross_entropy`.
        optimizer: of a plain net, over its parameters.
        epochs: how many times to go through the data.
        likelihood: of a noisy net's output; `Categorical()` by default.
        validation: inputs and targets that train nothing, for the temperature.
        beta: the weight of the KL.
        lr: the highest learning rate.

    >>> import torch, vardrop as vd
    >>> x = torch.randn(64, 4)
    >>> data = [(x, x[:, :2].argmax(1))]
    >>> net = vd.convert(torch.nn.Linear(4, 2), vd.bayes_by_backprop())
    >>> elbo = vd.fine_tune(net, data, epochs=2, validation=data[0])
    >>> vd.predict(elbo, x)
    Prediction(64 rows, Categorical, 32 draws)
    """
    check_net(net)
    if not has_noise(net):
        if loss is None or optimizer is None:
            raise VardropError(
                "Expected `loss` and `optimizer` for a plain net, but got "
                f"{'no loss' if loss is None else 'no optimizer'}. Pass both, or convert the net."
            )
        return finishing.fine_tune(net, data, loss, optimizer, 1 if epochs is None else epochs)
    if loss is not None or optimizer is not None:
        raise VardropError(
            "Expected `likelihood` for a noisy net, but got a `loss` or an `optimizer`. "
            "Its loss is the ELBO; train with vardrop.ELBO for an optimizer of your own."
        )
    epochs = 3 if epochs is None else epochs
    check_integer("epochs", epochs)
    check_number("lr", lr, above=0)
    size = _size(data)
    elbo = ELBO(net, Categorical() if likelihood is None else likelihood, size.rows, beta)
    if validation is not None:
        _check_pair(validation)
    _quieten(net)
    _train(elbo, data, epochs, epochs * size.batches, lr)
    if validation is not None:
        elbo.likelihood = calibrate(elbo, *validation, seed=0)
    return elbo


@torch.no_grad()
def _quieten(net: nn.Module) -> None:
    """Lower the noise of weights that nobody has trained yet, each once."""
    fresh = {}
    for _, _, tensor in noisy_weights(net):
        if not tensor.posterior.learned or tensor.posterior.zero_mean:
            continue
        start = tensor.posterior.initial(tensor.mean, tensor.axes)
        if "log_alpha" in start and torch.equal(start["log_alpha"], tensor.noise["log_alpha"]):
            fresh[id(tensor.noise["log_alpha"])] = tensor.noise["log_alpha"]
    for noise in fresh.values():
        noise.sub_(math.log(_QUIET))


class _Size(NamedTuple):
    rows: int
    batches: int


def _size(data: Batches) -> _Size:
    counts = [len(y) for _, y in data]
    if not counts:
        raise VardropError("Expected `data` to give batches, but got none.")
    return _Size(sum(counts), len(counts))


def _check_pair(validation: Any) -> None:
    pair = isinstance(validation, tuple | list) and len(validation) == 2
    if not pair or not isinstance(validation[1], Tensor) or not tensors_in(validation[0]):
        raise VardropError(
            f"Expected `validation` to be a pair of tensors (inputs, targets), but got "
            f"{type(validation).__name__}."
        )


def _train(elbo: ELBO, data: Batches, epochs: int, steps: int, lr: float) -> None:
    modes = {module: mode_of(module) for module in elbo.modules()}
    groups, noise = parameter_groups(elbo, lr, noise_lr=_NOISE_RATE * lr), NoiseCheck(elbo.net)
    rates, optimizer = [group["lr"] for group in groups], torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=max(steps, 2))
    elbo.train()
    done = 0
    try:
        for _ in range(epochs):
            for x, y in data:
                value = elbo(x, y).loss
                if not bool(value.isfinite()):
                    raise NotFiniteError(
                        f"Expected a finite loss, but got {value.item()} in step {done}. "
                        "Lower `lr`, or look for NaN in the data."
                    )
                optimizer.zero_grad(set_to_none=True)
                value.backward()
                optimizer.step()
                done += 1
                if done < steps:
                    schedule.step()
    finally:
        for module, mode in modes.items():
            module.training = mode
    if done != steps:
        raise VardropError(
            f"Expected `data` to give {steps // epochs} batches in every epoch, but got {done} in "
            f"{epochs} epochs. Give a list or a loader, not an iterator."
        )
    noise.warn(steps)


@torch.no_grad()
def laplace(
    net: nn.Module,
    data: Batches,
    validation: tuple[Any, Tensor],
    likelihood: Likelihood | None = None,
    seed: int = 0,
) -> ELBO:
    """Lay noise around the weights of a trained net, without training: its diagonal Laplace fit.

        sigma_i^2 = 1 / (N F_i + tau),   F_i = E_x E_{y ~ p(y | x)} (d log p(y | x) / dw_i)^2

    The precision tau of the prior is the one of 10^-2 ... 10^6 whose predictions have the highest
    likelihood on the validation data, where the width of the likelihood's noise is fitted too. The
    means stay as they are. Noise in the last layer alone is the safest choice:
    `vardrop.convert(net, vardrop.bayes_by_backprop(), where="fc")` first.

    Args:
        net: a net whose noisy weights have an `AdditiveGaussian` posterior.
        data: batches (inputs, targets) of the training data; of the targets it is looked at alone
            which of them count. F is estimated by 64 draws per batch, to a relative error of
            sqrt(1 / (32 batches)).
        validation: inputs and targets that trained nothing.
        likelihood: of the output; `Categorical()` by default.
        seed: of the draws.

    Returns:
        An ELBO with the net, which is changed in place, and the calibrated likelihood, to predict.

    >>> import torch, vardrop as vd
    >>> x = torch.randn(64, 4)
    >>> pair = (x, x[:, :2].argmax(1))
    >>> net = vd.convert(torch.nn.Linear(4, 2), vd.bayes_by_backprop())
    >>> vd.predict(vd.laplace(net, [pair], pair), x)
    Prediction(64 rows, Categorical, 32 draws)

    MacKay 1992, "A practical Bayesian framework for backpropagation networks"; Daxberger et al.
    2021, "Laplace redux", sec. 2 and 3.
    """
    noisy_modules(net)
    _check_pair(validation)
    check_type("seed", seed, int, "an integer")
    weights = {name: tensor for name, _, tensor in noisy_weights(net)}
    wrong = {
        n: t.posterior for n, t in weights.items() if type(t.posterior) is not AdditiveGaussian
    }
    if wrong or not weights:
        raise VardropError(
            "Expected noisy weights with an AdditiveGaussian posterior, but got "
            f"{wrong or 'gates or heads only'}. Convert with vardrop.bayes_by_backprop()."
        )
    given = Categorical() if likelihood is None else likelihood
    information, rows = _information(net, data, given, seed)
    best: tuple[float, float, Likelihood] | None = None
    for precision in _PRECISIONS:
        _set_noise(weights, information, precision)
        fitted = calibrate(net, *validation, given, seed=seed)
        nll = -float(
            predict(net, validation[0], likelihood=fitted, seed=seed).log_prob(validation[1]).mean()
        )
        if best is None or nll < best[0]:
            best = nll, precision, fitted
    assert best is not None
    _set_noise(weights, information, best[1])
    return ELBO(net, best[2], rows)


def _information(
    net: nn.Module, data: Batches, likelihood: Likelihood, seed: int
) -> tuple[dict[str, Tensor], int]:
    """N F of every noisy weight at the means, and N."""
    weights = {name: tensor for name, _, tensor in noisy_weights(net)}
    for tensor in weights.values():
        tensor.noise["log_sigma2"].fill_(_SMALL)
    totals: dict[str, Tensor] = {}
    variance, rows = math.exp(_SMALL), 0
    for x, y in data:
        # kappa = -sigma^2 F per row
        counted = likelihood.counted(y)
        for name, kappa in unlabelled_kappa(net, x, likelihood, seed, counted).items():
            before = totals.get(name, torch.zeros_like(kappa))
            totals[name] = before - kappa * (len(y) / variance)
        rows += len(y)
    if not rows:
        raise VardropError("Expected `data` to give batches, but got none.")
    return totals, rows


_SMALL = -20.0  # log variances at which a draw is the mean


def _set_noise(weights: dict[str, Any], information: dict[str, Tensor], precision: float) -> None:
    for name, tensor in weights.items():
        if name in information:  # tied weights are counted once
            tensor.noise["log_sigma2"].copy_(-torch.log(information[name] + precision))
