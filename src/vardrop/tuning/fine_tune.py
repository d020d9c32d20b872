"""Train a trained model further: a pruned model, or a model made noisy."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Batch,
    LabelledData,
    call_net,
    labelled_batches,
    map_tensors,
    plain_batch,
    split_batch,
)
from vardrop._core.checks import check_integer, check_net, check_number, check_type
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.modules import hooks, training_mode
from vardrop.conversion import revert
from vardrop.likelihoods import Categorical, Likelihood
from vardrop.noisy import has_noise, noisy_weights
from vardrop.objective import ELBO, parameter_groups
from vardrop.prediction import fit_log_scale, predict
from vardrop.tuning.batches import check_batch, check_rereadable
from vardrop.tuning.callbacks import NoiseCheck
from vardrop.tuning.minimize import Position, ShowProgress, minimize

Batches = Iterable[tuple[Batch, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]
_INITIAL_FACTOR = 50.0  # divides the initial variance of multiplicative noise
_NOISE_LR = 0.1  # highest learning rate of the noise
_DRAWS, _FEW_DRAWS = 32, 16  # for the temperature
_LEAST_EXAMPLES, _BATCH_SIZE = 100, 256


@overload
def fine_tune(
    net: nn.Module,
    data: Batches,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    epochs: int = ...,
    *,
    progress: bool | None = ...,
) -> nn.Module: ...
@overload
def fine_tune(
    net: nn.Module,
    data: Batches,
    *,
    epochs: int = ...,
    likelihood: Likelihood | None = ...,
    validation: LabelledData | None = ...,
    beta: float = ...,
    lr: float = ...,
    progress: bool | None = ...,
) -> ELBO: ...
def fine_tune(
    net: nn.Module,
    data: Batches,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    epochs: int | None = None,
    *,
    likelihood: Likelihood | None = None,
    validation: LabelledData | None = None,
    beta: float = 0.02,
    lr: float = 4e-3,
    progress: bool | None = None,
) -> nn.Module:
    """Train a trained model further, in place: a pruned model, or a model made noisy.

    A plain model is trained with `loss` and `optimizer`, for one epoch by default. Weights at zero
    stay at zero, and the model is returned.

    A noisy model is trained with its ELBO, for six epochs by default: Adam, one cycle of the
    learning rate, and 0.02 of the KL. The full KL costs likelihood if there are many weights and
    few epochs. The noise has its own highest learning rate, 0.1, because log sigma^2 has to change
    by several units in few steps. Multiplicative noise that still has its initial value
    starts at a fiftieth of it: recipes choose the initial noise for training from scratch, and a
    trained model would unlearn. The ELBO is returned: `predict(elbo, x)` uses its model, likelihood
    and temperature.

    With `validation`, the temperature or the width of the likelihood is fitted at the end, as by
    `calibrate`, and the result is never worse there than before: if its NLL is not lower than the
    NLL of the model before the training, without noise and with a temperature, the model becomes
    that plain model again (`revert`), with a warning. A model without a plain form stays as
    trained. If predictions for `validation` would take much of the time, they use 16 draws instead
    of 32 and evenly spaced examples instead of all.

    If it is interrupted (Ctrl-C), the model keeps the parameters of the last step and its modes.

    Args:
        net: a plain model, such as the result of `shrink`, or a model from `convert`.
        data: batches (inputs, targets), read once per epoch, and for a noisy model once before to
            count them.
        loss: of a plain model, such as `torch.nn.functional.cross_entropy`.
        optimizer: of a plain model, over its parameters.
        epochs: passes over the data.
        likelihood: of a noisy model's output; `Categorical()` by default.
        validation: inputs and targets, or batches of them, that are not used for training, for the
            temperature and for the comparison with the plain model.
        beta: the weight of the KL.
        lr: the highest learning rate of the weights. The default suits models that were trained
            with Adam from random weights. A pretrained transformer needs a smaller one, as in any
            fine-tuning.
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        The plain model, or the ELBO of a noisy model.

    >>> import torch, vardrop as vd
    >>> x = torch.randn(64, 4)
    >>> data = [(x, x[:, :2].argmax(1))]
    >>> net = vd.convert(torch.nn.Linear(4, 2), vd.bayes_by_backprop())
    >>> elbo = vd.fine_tune(net, data, epochs=2, validation=data[0])
    >>> vd.predict(elbo, x)
    Prediction(64 examples, Categorical, 32 draws)
    """
    check_net(net)
    check_rereadable("data", data)
    check_integer("epochs", 1 if epochs is None else epochs)
    if not has_noise(net):
        if loss is None or optimizer is None:
            raise VardropError(
                "Expected `loss` and `optimizer` for a plain net, but got "
                f"{'no loss' if loss is None else 'no optimizer'}. Pass both, or convert the net."
            )
        return _fine_tune_plain(net, data, loss, optimizer, epochs or 1, progress)
    if loss is not None or optimizer is not None:
        raise VardropError(
            "Expected `likelihood` for a noisy net, but got a `loss` or an `optimizer`. Its loss "
            "is the ELBO. Train with vardrop.ELBO to use your own optimizer."
        )
    check_number("lr", lr, above=0)
    held_out: list[tuple[Batch, Tensor]] = []
    if validation is not None:
        held_out = list(labelled_batches(validation, "validation"))
        match validation:
            case [x, Tensor() as y]:  # a pair is one batch
                held_out = [(plain_batch(x), y)]
    sizes, epochs = [len(_check_pair(batch)[1]) for batch in data], epochs or 6
    if not sizes:
        raise VardropError("Expected `data` to give batches, but got none.")
    elbo = ELBO(net, Categorical() if likelihood is None else likelihood, sum(sizes), beta)
    train = partial(_fine_tune_noisy, elbo, data, epochs, len(sizes), lr, progress)
    if held_out:
        _train_and_compare(elbo, train, *_limit_validation(held_out, epochs * elbo.num_data))
    else:
        train()
    return elbo


def _check_pair(batch: object) -> tuple[Batch, Tensor]:
    """Return a batch (inputs, targets). Any other raises an error."""
    x, y, *weight = check_batch(batch, "batches of `data`")
    if weight:
        raise VardropError(
            "Expected batches of `data` to be tensors (x, y), but got weights too. Train with "
            "vardrop.ELBO."
        )
    return x, y


def _train_and_compare(
    elbo: ELBO, train: Callable[[], None], validation: Sequence[tuple[Batch, Tensor]], samples: int
) -> None:
    """Train and calibrate, and make the model plain again if that is not better on `validation`."""
    before, has_plain_form = copy.deepcopy(elbo), True
    try:
        revert(before.net)
    except VardropError:
        has_plain_form = False
    plain_likelihood, nll = _calibrate(before, validation, 1)  # checks the targets, too
    train()
    elbo.likelihood, noisy_nll = _calibrate(elbo, validation, samples)
    if has_plain_form and noisy_nll >= nll:
        warnings.warn(
            f"The NLL on `validation` is {noisy_nll:.4f} with noise and {nll:.4f} without, so "
            "the model is plain again, as before the training, with a fitted temperature. "
            "Train for more epochs (`epochs`), or with another `beta`.",
            stacklevel=3,
        )
        revert(elbo.net).load_state_dict(before.net.state_dict())
        elbo.set_beta(0.0)
        elbo.likelihood = plain_likelihood


def _calibrate(
    elbo: ELBO, validation: Sequence[tuple[Batch, Tensor]], samples: int
) -> tuple[Likelihood, float]:
    """The calibrated likelihood, and its NLL on the same data."""
    x = [part for inputs, _ in validation for part in split_batch(inputs, _BATCH_SIZE)]
    y = torch.cat([targets for _, targets in validation])
    p = predict(elbo, x, samples, seed=0, progress=False)
    factor = math.exp(fit_log_scale([(p, y, 1.0)]))
    return p.likelihood.scaled(factor), -float(p.rescale(factor).log_prob(y).mean())


@torch.no_grad()
def reduce_initial_noise(net: nn.Module) -> None:
    """Reduce multiplicative noise that still has the initial value of its recipe."""
    initial = {}
    for _, _, tensor in noisy_weights(net):
        if not tensor.posterior.learned or tensor.posterior.zero_mean:
            continue
        start = tensor.posterior.initial(tensor.mean, tensor.axes)
        if "log_alpha" in start and torch.equal(start["log_alpha"], tensor.noise["log_alpha"]):
            initial[id(tensor.noise["log_alpha"])] = tensor.noise["log_alpha"]
    for log_alpha in initial.values():
        log_alpha.sub_(math.log(_INITIAL_FACTOR))


def _limit_validation(
    batches: Sequence[tuple[Batch, Tensor]], trained: int
) -> tuple[Sequence[tuple[Batch, Tensor]], int]:
    """Validation data and a number of draws that cost little next to the training.

    A draw costs about half as much as a training step on the same example. Draws times examples are
    therefore limited to half of the number of examples that were trained on.
    """
    total = sum(len(y) for _, y in batches)
    if _DRAWS * total <= trained // 2:
        return batches, _DRAWS
    count = min(total, max(_LEAST_EXAMPLES, trained // 2 // _FEW_DRAWS))
    selected = torch.zeros(total, dtype=torch.bool)
    selected[torch.arange(count) * total // count] = True
    masks = selected.split([len(y) for _, y in batches])

    def select(batch: tuple[Batch, Tensor], mask: Tensor) -> tuple[Batch, Tensor]:
        return map_tensors(lambda t: t[mask.to(t.device)] if t.dim() else t, batch)

    return [b for b in map(select, batches, masks) if len(b[1])], _FEW_DRAWS


def _fine_tune_plain(
    net: nn.Module,
    data: Batches,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    progress: bool | None,
) -> nn.Module:
    check_type("optimizer", optimizer, torch.optim.Optimizer, "an optimizer")
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if optimized.isdisjoint(map(id, net.parameters())):
        raise VardropError(
            "Expected `optimizer` to hold parameters of `net`, but got none of them. "
            "Build it over net.parameters() after shrinking."
        )

    def compute(batch: tuple[Batch, Tensor], at: Position) -> Tensor:
        output = call_net(net, batch[0])
        with report_arguments("loss", "data"):
            return loss(output, batch[1])

    weights = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    masks = [p.register_hook(partial(torch.mul, p.detach() != 0)) for p in weights]
    with hooks(*masks), ShowProgress("fine_tune", progress=progress) as line:
        minimize(
            compute, lambda at: map(_check_pair, data), optimizer, epochs=epochs, callbacks=[line]
        )
    return net


def _fine_tune_noisy(
    elbo: ELBO, data: Batches, epochs: int, epoch_steps: int, lr: float, progress: bool | None
) -> None:
    modes, steps = {m: training_mode(m) for m in elbo.modules()}, epochs * epoch_steps
    reduce_initial_noise(elbo.net)
    optimizer = torch.optim.Adam(parameter_groups(elbo, lr, noise_lr=_NOISE_LR))
    rates = [group["lr"] for group in optimizer.param_groups]
    # It also changes the first beta of Adam.
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=max(steps, 2))

    def step_schedule(*_: object) -> None:
        if one_cycle.last_epoch + 1 < one_cycle.total_steps:  # a stream may grow
            one_cycle.step()

    optimizer.register_step_post_hook(step_schedule)
    elbo.train()
    try:
        with ShowProgress("fine_tune", steps, progress) as line:
            minimize(
                lambda batch, at: elbo(*batch).loss,
                lambda at: data,
                optimizer,
                epochs=epochs,
                callbacks=[NoiseCheck(elbo, epochs), line],
            )
    finally:
        for module, mode in modes.items():
            module.training = mode
