"""Train a net that was trained before: a pruned one, or one made noisy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from vardrop._core.calls import call, tensors_in
from vardrop._core.checks import check_integer, check_net, check_number, check_type
from vardrop._core.errors import NotFiniteError, VardropError
from vardrop.compression.probes import hooks, to_arguments
from vardrop.likelihoods import Categorical, Likelihood
from vardrop.noisy import has_noise, noisy_weights, training_mode
from vardrop.objective import ELBO, parameter_groups
from vardrop.prediction import calibrate
from vardrop.tuning.noise_check import NoiseCheck

Batches = Iterable[tuple[Any, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]
_QUIET = 50.0  # by how much less variance a trained net starts, of multiplicative noise
_NOISE_RATE = 100.0  # times the learning rate of the weights


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
        return _fine_tune_plain(net, data, loss, optimizer, 1 if epochs is None else epochs)
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


def _fine_tune_plain(
    net: nn.Module, data: Batches, loss: Loss, optimizer: torch.optim.Optimizer, epochs: int
) -> nn.Module:
    """Train the weights that are left, in place; weights at zero stay at zero."""
    check_type("data", data, Iterable, "batches of (inputs, targets)")
    check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer")
    check_integer("epochs", epochs)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(p) for p in net.parameters()}:
        raise VardropError(
            "Expected `optimizer` to hold parameters of `net`, but got none of them. "
            "Build it over net.parameters() after shrinking."
        )
    weights = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    kept = [(p, p.detach() != 0) for p in weights]
    with hooks(*(p.register_hook(partial(torch.mul, mask)) for p, mask in kept)):
        steps = _descend(data, epochs, optimizer, lambda x, y: loss(call(net, to_arguments(x)), y))
    if 0 in steps:
        raise VardropError(
            "Expected `data` to give batches in every epoch, but got none in epoch "
            f"{steps.index(0)}. Give a list or a loader, not an iterator."
        )
    return net


def _descend(
    data: Batches,
    epochs: int,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    after: Callable[[int], None] = lambda step: None,
) -> list[int]:
    """Take one step per batch; how many steps every epoch had."""
    steps: list[int] = []
    for epoch in range(epochs):
        steps.append(0)
        for x, y in data:
            optimizer.zero_grad(set_to_none=True)
            value = loss(x, y)
            if not bool(value.isfinite()):
                raise NotFiniteError(
                    f"Expected a finite loss, but got {value.item()} in step {steps[-1]} of "
                    f"epoch {epoch}. The net is as it was before that step: lower the learning "
                    "rate, or look for NaN in the data."
                )
            value.backward()
            optimizer.step()
            steps[-1] += 1
            after(sum(steps))
    return steps


def _train(elbo: ELBO, data: Batches, epochs: int, steps: int, lr: float) -> None:
    modes = {module: training_mode(module) for module in elbo.modules()}
    groups, noise = parameter_groups(elbo, lr, noise_lr=_NOISE_RATE * lr), NoiseCheck(elbo.net)
    rates, optimizer = [group["lr"] for group in groups], torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=max(steps, 2))
    elbo.train()
    try:
        done = sum(
            _descend(
                data,
                epochs,
                optimizer,
                lambda x, y: elbo(x, y).loss,
                after=lambda step: schedule.step() if step < steps else None,
            )
        )
    finally:
        for module, mode in modes.items():
            module.training = mode
    if done != steps:
        raise VardropError(
            f"Expected `data` to give {steps // epochs} batches in every epoch, but got {done} in "
            f"{epochs} epochs. Give a list or a loader, not an iterator."
        )
    noise.warn(steps)
