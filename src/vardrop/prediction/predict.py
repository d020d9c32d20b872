"""`predict`, the predictive distribution of a noisy model, and `freeze`, a predictor to serve."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from vardrop._core.calls import BatchOrLoader, Pick
from vardrop._core.checks import check_choice, check_integer
from vardrop._core.errors import VardropError
from vardrop.likelihoods import Likelihood, Objective, resolve_likelihood
from vardrop.prediction.conformal import Conformal
from vardrop.prediction.eval_copy import copy_tensors
from vardrop.prediction.prediction import Prediction
from vardrop.prediction.predictor import Draw, Mode, Predictor


def predict(
    net: nn.Module | Objective,
    x: BatchOrLoader,
    samples: int = 32,
    *,
    mode: Mode = "sample",
    draw: Draw = "estimator",
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    memory: int = 2**28,
    tolerance: float | None = None,
    keep: int | None = None,
    output: Pick | None = None,
    batched: bool = True,
    progress: bool | None = None,
) -> Prediction:
    """The predictive distribution of a noisy model: p(y | x) = E_w p(y | x, w).

    A copy of the model runs in evaluation mode with its noise on. The model itself is not changed,
    so several threads can predict with it at once. For repeated calls make a `vardrop.Predictor`.

    Args:
        net: a model with a posterior, gates, a head or dropout, whose output is one tensor or has
            `logits`. Or an ELBO, whose likelihood is then used, with its learned noise. An ELBO
            with a plain model predicts without draws.
        x: inputs (N, ...), a tensor or a dictionary of the model's arguments. Or a loader of
            batches, each of them such an input or a tuple that begins with one.
        samples: number of draws.
        mode: "sample"; "mean", the model without noise (weight scaling); or "moments", one analytic
            pass that carries mean and variance, with `samples` normal draws at the output.
        draw: "estimator" draws noise as the layers do in training, for every batch size. "local"
            draws fresh noise for every example and position. "functions" draws whole functions:
            draw k is one model, so that examples and positions vary together. Dense layers have the
            same marginals in all three. A convolution keeps the covariance between positions with
            "functions" and loses it with "local", which changes the uncertainty after pooling.
        likelihood: the meaning of the output: `Categorical()` logits by default (classes on axis
            1), `Bernoulli()` logits, `Gaussian(std)` means, `HeteroscedasticGaussian()` means and
            log variances, or `Values()` without noise of the targets.
        seed: makes the call repeatable, whatever other threads draw, and leaves the global
            generator unchanged. Without it a seed is drawn from the global generator.
        memory: bytes that draws may take at once, without the draws that are kept.
        tolerance: stop drawing for a batch as soon as the standard error of each mean probability
            (of each mean value in regression) is below it.
        keep: number of draws to keep for intervals and for densities of values; all by default.
        output: picks the tensor from the model's output, such as `lambda out: out[0]`.
        batched: False for one input that is not split into examples, such as a graph or a list of
            graphs: a tensor, a tuple of arguments, a dictionary of named arguments, or any object
            that the model takes. Every draw is then one pass.
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        A `Prediction` with probabilities or means, aleatoric and epistemic uncertainty.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> predict(net, torch.randn(5, 4), samples=8, seed=0)
    Prediction(5 examples, Categorical, 8 draws)

    Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", eq. 6; Wang & Manning 2013, "Fast
    dropout training" (moments).
    """
    predictor = Predictor(
        net, samples, mode=mode, draw=draw, likelihood=likelihood, memory=memory,
        tolerance=tolerance, keep=keep, output=output, batched=batched,
    )  # fmt: skip
    predictor.is_kept = False
    return predictor(x, seed, progress)


def predict_batches(
    net: nn.Module | Objective,
    x: Iterable[object],
    samples: int = 32,
    *,
    seed: int | None = None,
    **options: Any,
) -> Iterator[Prediction]:
    """Predict the batches of a loader one after the other, so that memory holds one at a time.

    With the same seed the predictions are those of `predict` for the whole loader.

    Args:
        net, samples, seed: as for `predict`.
        x: a loader of batches, each of them an input or a tuple that begins with one.
        options: `mode`, `draw`, `likelihood`, `memory`, `tolerance`, `keep` and `output`, as for
            `predict`.

    Returns:
        An iterator of predictions, one per batch.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> for p in vd.predict_batches(net, torch.randn(5, 4).split(2), samples=8):
    ...     print(tuple(p.probs.shape))
    (2, 3)
    (2, 3)
    (1, 3)
    """
    if isinstance(x, Tensor | Mapping):
        raise VardropError(
            f"Expected `x` to be a loader of batches, but got {type(x).__name__}. Split it, for "
            "example with x.split(1000), or call `predict`."
        )
    predictor = Predictor(net, samples, **options)
    predictor.is_kept = False
    return predictor.batches(x, seed)


def freeze(
    net: nn.Module | Objective,
    samples: int = 32,
    *,
    mode: Literal["sample", "moments"] = "sample",
    draw: Draw = "estimator",
    likelihood: Likelihood | None = None,
    conformal: Conformal | None = None,
    level: float = 0.95,
    memory: int = 2**28,
    output: Pick | None = None,
    batched: bool = True,
) -> Predictor:
    """Copy a trained model into a `Predictor` with constant tensors, to serve or to export.

    Everything that does not depend on the input is computed once. Predictions equal those of
    `predict` with the same arguments and seed. The copy does not change when the model is trained,
    pruned or loaded afterwards.

    Args:
        net: a noisy model in evaluation mode, or an ELBO, whose likelihood is then used. Or a
            `Predictor` or `Ensemble`, whose settings are then used instead of the other arguments.
        samples: number of draws; with mode="moments", of draws at the output.
        mode: "sample", or "moments": one analytic pass that carries mean and variance.
        draw: as for `predict`.
        likelihood: as for `predict`, or the calibrated likelihood of `calibrate`.
        conformal: the rule of `conformal`, fitted on predictions of the same mode. It then gives
            the interval, or sets of classes.
        level: of the interval without such a rule.
        memory: bytes that draws may take at once.
        output: picks the tensor from the model's output.
        batched: as for `predict`.

    Returns:
        A `Predictor` that owns its copy of the model.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop()).eval()
    >>> predictor, x = vd.freeze(net, samples=8), torch.randn(5, 4)
    >>> predictor(x)
    Prediction(5 examples, Categorical, 8 draws)
    >>> dict(zip(predictor.output_names, predictor.outputs(x)))["epistemic"].shape
    torch.Size([5])
    """
    if isinstance(net, Predictor):
        frozen = copy.copy(net)
        frozen.replace_net(copy_tensors(net.net))
        return frozen
    check_integer("samples", samples, remedy="To predict, call the result: freeze(net)(x).")
    check_choice("mode", mode, ("sample", "moments"))
    model, meaning = resolve_likelihood(net, likelihood)
    for name, module in model.named_modules():
        if module.training:  # its statistics and weights still change
            raise VardropError(
                f"Expected `net` in evaluation mode, but got '{name or '(net)'}' "
                f"({type(module).__name__}) in training mode. Call net.eval() after training."
            )
    fixed = copy.deepcopy(meaning.frozen_copy()).requires_grad_(False)
    predictor = Predictor(
        net, samples, mode=mode, draw=draw, likelihood=fixed, conformal=conformal, level=level,
        memory=memory, output=output, batched=batched,
    )  # fmt: skip
    predictor.replace_net(copy_tensors(model))
    return predictor
