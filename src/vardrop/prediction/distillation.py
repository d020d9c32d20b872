"""Distillation: the ensemble of a noisy net in one deterministic net."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop.errors import VardropError
from vardrop.prediction.ensemble import predict
from vardrop.prediction.modes import batches
from vardrop.prediction.outputs import Likelihood, check_likelihood
from vardrop.prediction.progress import Progress
from vardrop.prediction.result import Prediction

Student = TypeVar("Student", bound=nn.Module)


def distil(
    net: nn.Module,
    loader: Tensor | Collection[object],
    student: Student,
    *,
    epochs: int = 10,
    samples: int = 16,
    temperature: float = 1.0,
    likelihood: Likelihood = "categorical",
    noise_std: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> Student:
    """Train a student to give the predictive distribution of a noisy net in one plain pass.

    Classification: T^2 KL(p_T || student_T), with p_T the ensemble's mean probability raised to
    1/T and normalised, and the student's logits divided by T. Regression: the KL from the normal
    with the ensemble's mean and variance ("heteroscedastic"), or the squared error of the mean.

    Args:
        net: the noisy teacher; it stays as it is.
        loader: inputs, as for `predict`, passed over once an epoch.
        student: any net with outputs of the same shape; trained in place and returned.
        epochs: passes over the loader; the teacher draws anew in every one.
        samples: draws of the teacher a batch.
        temperature: T > 1 shows the student more of the small probabilities.
        likelihood, noise_std: as for `predict`.
        optimizer: over the student's parameters; Adam with rate 1e-3 by default.
        seed: of the teacher's draws.
        progress: write a line to stderr.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import distil
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> student = distil(net, torch.randn(8, 4), torch.nn.Linear(4, 3), epochs=2)
    >>> student.training
    True

    Hinton, Vinyals & Dean 2015, "Distilling the knowledge in a neural network", eq. 1; Balan et
    al. 2015, "Bayesian dark knowledge", eq. 5.
    """
    check_likelihood(likelihood, noise_std)
    if epochs < 1:
        raise VardropError(f"Expected `epochs` to be at least 1, but got {epochs}.")
    if not temperature > 0:
        raise VardropError(f"Expected `temperature` to be positive, but got {temperature}.")
    chosen = optimizer or torch.optim.Adam(student.parameters(), lr=1e-3)
    with Progress("batches", None, progress) as shown:
        for epoch in range(epochs):
            for step, x in enumerate(batches(net, loader)):
                draw = None if seed is None else seed + epoch * 1_000_003 + step
                taught = predict(
                    net, x, samples, likelihood=likelihood, noise_std=noise_std, seed=draw, keep=0
                )
                loss = _loss(student(x), taught, temperature)
                chosen.zero_grad(set_to_none=True)
                loss.backward()
                chosen.step()
                shown.advance()
    return student


def _loss(output: Tensor, taught: Prediction, temperature: float) -> Tensor:
    expected = taught.mean.shape
    if taught.likelihood == "heteroscedastic":
        expected = torch.Size((*expected[:-1], 2 * expected[-1]))
    if output.shape != expected:
        raise VardropError(
            f"Expected the output of `student` to have shape {tuple(expected)}, but got "
            f"{tuple(output.shape)}."
        )
    if taught.likelihood == "categorical":
        target = functional.softmax(taught.probs.log() / temperature, 1)
        log_probs = functional.log_softmax(output / temperature, 1)
        cross = torch.special.xlogy(target, target) - target * log_probs
        return temperature**2 * cross.sum(1).mean()
    if taught.likelihood == "bernoulli":
        return functional.binary_cross_entropy_with_logits(output, taught.probs)
    if taught.likelihood == "gaussian":
        return functional.mse_loss(output, taught.mean)
    mean, log_variance = output.chunk(2, dim=-1)
    square = (taught.mean - mean).square() + taught.std.square()
    return 0.5 * (square * torch.exp(-log_variance) + log_variance).mean()
