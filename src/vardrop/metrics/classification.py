"""Proper scores of class probabilities."""

from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from vardrop.metrics.validate import check_classification, weighted_mean


def accuracy(probs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Fraction of examples whose most probable class is the label.

    1/N sum_n [argmax_k p_nk = y_n]. A tie goes to the lowest class index.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).
        weight: how many examples each example counts for, shape (N,). One if None.

    Returns:
        scalar in [0, 1].

    >>> import torch
    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    tensor(0.5000)

    Gneiting & Raftery 2007, "Strictly proper scoring rules, prediction, and estimation" (the
    zero-one score).
    """
    probs, y = check_classification(probs, y)
    return weighted_mean((probs.argmax(dim=1) == y).to(probs.dtype), weight)


def nll(probs: Tensor, y: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels, from probabilities.

    -1/N sum_n log p_n,y_n. It is infinite if a label has probability zero. If probabilities may
    underflow, use `nll_from_log_probs`.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).

    Returns:
        scalar in nats, at least 0.

    >>> import torch
    >>> nll(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([0, 1]))
    tensor(0.6931)

    Good 1952, "Rational decisions".
    """
    probs, y = check_classification(probs, y)
    return nll_loss(probs.log(), y)


def nll_from_log_probs(log_probs: Tensor, y: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels, from log-probabilities.

    -1/N sum_n log p_n,y_n.

    Args:
        log_probs: logarithms of class probabilities, shape (N, K). -inf is probability zero.
        y: class indices, shape (N,).

    Returns:
        scalar in nats, at least 0.

    >>> import torch
    >>> log_probs = torch.tensor([[0.0, -200.0]]).log_softmax(dim=1)
    >>> nll_from_log_probs(log_probs, torch.tensor([1]))
    tensor(200.)

    Good 1952, "Rational decisions".
    """
    return nll_loss(*check_classification(log_probs, y, logarithms=True))


def brier(probs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Brier score: squared distance between the probabilities and the one-hot label.

    1/N sum_n sum_k (p_nk - [y_n = k])^2. The sum runs over all classes as in the paper, so with two
    classes it is twice the score of the one event.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).
        weight: how many examples each example counts for, shape (N,). One if None.

    Returns:
        scalar in [0, 2].

    >>> import torch
    >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0]))
    tensor(0.2500)

    Brier 1950, "Verification of forecasts expressed in terms of probability".
    """
    probs, y = check_classification(probs, y)
    return weighted_mean((probs - one_hot(y, probs.shape[1])).square().sum(dim=1), weight)
