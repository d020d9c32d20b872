"""Distillation: train a plain student to give the predictive distribution of a noisy model."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Batch,
    call_net,
    clone_batch,
    device_of,
    input_batches,
    output_tensor,
)
from vardrop._core.checks import check_integer, check_net, check_number
from vardrop._core.errors import VardropError, report_arguments
from vardrop.likelihoods import Likelihood, Objective, TeacherOutput, resolve_likelihood
from vardrop.prediction import predict
from vardrop.tuning.minimize import Position, ShowProgress, minimize

Student = TypeVar("Student", bound=nn.Module)
_EPOCH_SEEDS = 1_000_003  # seeds that an epoch may use


def distil(
    net: nn.Module | Objective,
    data: Tensor | Collection[object],
    student: Student,
    *,
    epochs: int = 10,
    samples: int = 16,
    temperature: float = 1.0,
    likelihood: Likelihood | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> Student:
    """Train a student to give the predictive distribution of a noisy model in one plain pass.

    Classification: T^2 KL(p_T || student_T), with p_T the ensemble's mean probability raised to
    1/T and normalised, and the student's logits divided by T. Regression: the KL from the normal
    with the ensemble's mean and variance (`HeteroscedasticGaussian`), or the squared error of the
    mean.

    If it is interrupted (Ctrl-C), the student keeps the parameters of the last step.

    Args:
        net: the noisy teacher, or an ELBO with it. It is left unchanged.
        data: inputs, as for `predict`, read once per epoch.
        student: any model with outputs of the same shape, trained in place and returned.
        epochs: passes over the data. The teacher draws new samples in every one.
        samples: draws of the teacher per batch.
        temperature: T > 1 gives more weight to small probabilities.
        likelihood: as for `predict`.
        optimizer: over the student's parameters; Adam with learning rate 1e-3 by default.
        seed: of the teacher's draws.
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        The student.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> student = vd.distil(net, torch.randn(8, 4), torch.nn.Linear(4, 3), epochs=2)
    >>> student.training
    True

    Hinton, Vinyals & Dean 2015, "Distilling the knowledge in a neural network", eq. 1; Balan et
    al. 2015, "Bayesian dark knowledge", eq. 5.
    """
    model, teacher_likelihood = resolve_likelihood(net, likelihood)
    check_net(student, "student")
    check_integer("epochs", epochs)
    check_number("temperature", temperature, above=0)
    check_integer("seed", 0 if seed is None else seed, 0)
    if optimizer is None and not any(True for _ in student.parameters()):
        raise VardropError("Expected `student` to have parameters to train, but got none.")

    def loss(x: Batch, at: Position) -> Tensor:
        draw_seed = None if seed is None else seed + at.epoch * _EPOCH_SEEDS + at.step
        target = predict(model, x, samples, likelihood=teacher_likelihood, seed=draw_seed, keep=0)
        with report_arguments("student", "data"):
            logits = output_tensor(call_net(student, clone_batch(x)))
        expected = target.likelihood.output_shape(target.mean.shape)
        if logits.shape != expected:
            raise VardropError(
                f"Expected the output of `student` to have shape {tuple(expected)}, but got "
                f"{tuple(logits.shape)}."
            )
        teacher = TeacherOutput(target.mean, target.std, target.mean_log_probs)
        return target.likelihood.distillation_loss(logits, teacher, temperature)

    with ShowProgress("distil", progress=progress) as line:
        minimize(
            loss,
            lambda at: input_batches(device_of(model), data),
            optimizer or torch.optim.Adam(student.parameters(), lr=1e-3),
            epochs=epochs,
            callbacks=[line],
        )
    return student
