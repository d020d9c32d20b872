"""Selective mean propagation: noise only in the weights whose noise the likelihood depends on.

Those are the weights with a large |kappa| (`functional.curvature.kappa`). All others are at their
mean.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vardrop._core.calls import (
    call_arguments,
    clone_batch,
    num_examples,
    output_tensor,
    plain_batch,
)
from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop.functional import GeneratorNoise, draw_from, restore_state_on_error
from vardrop.functional.curvature import kappa as kappa_of
from vardrop.functional.random import resolve_seed
from vardrop.layers import Variational
from vardrop.likelihoods import Likelihood, Objective, resolve_likelihood
from vardrop.noisy import named_modules_of, noisy_weights, tensor_name
from vardrop.posteriors import Axes, Posterior, Sharing, Tensors
from vardrop.prediction.eval_copy import make_eval_copy

_DRAWS, _PROBES = 16, 4
_MASK = "sampled"


@dataclass(frozen=True)
class MaskedNoise(Posterior):
    """Another posterior, with its noise only where the tensor `sampled` is one."""

    base: Posterior

    @property
    def gaussian(self) -> bool:
        return self.base.gaussian

    @property
    def noise_per(self) -> Sharing | None:
        return self.base.noise_per

    @property
    def symmetric(self) -> bool:
        return self.base.symmetric

    @property
    def zero_mean(self) -> bool:
        return self.base.zero_mean

    @property
    def learned(self) -> bool:
        return self.base.learned

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {**self.base.initial(weight, axes), _MASK: torch.ones_like(weight)}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.base.variance(weight, tensors) * tensors.get(_MASK, 1)

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        return self.base.draw(weight, axes, batch)

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return self.base.perturbation(weight, noise, tensors) * tensors.get(_MASK, 1)

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.base.log_alpha(weight, tensors)


class Selected(NamedTuple):
    """A net with part of the noise of another, and the fraction of the weights that has it."""

    net: nn.Module
    fraction: float


def select(net: nn.Module, kappa: Mapping[str, Tensor], threshold: float) -> Selected:
    """The net with noise only in the weights whose |kappa| exceeds the threshold.

    The others are at their mean. The result shares its tensors with the net and is for prediction.

    Args:
        net: a net with noisy weights; it stays as it is.
        kappa: by layer name, from `vardrop.kappa` or, without labels, from `unlabelled_kappa`.
        threshold: of |kappa|; take a quantile of it.

    >>> import torch, vardrop as vd
    >>> from experiments.selective import select, unlabelled_kappa
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> x = torch.randn(5, 4)
    >>> some = select(net, unlabelled_kappa(net, x), threshold=1e-3)
    >>> vd.predict(some.net, x, samples=8)
    Prediction(5 examples, Categorical, 8 draws)

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks".
    """
    check_number("threshold", threshold, at_least=0, remedy="Take a quantile of |kappa|.")
    selected = clone_modules(net)
    layers, owner = _layers(selected), _owners(selected)
    if missing := sorted(set(owner.values()) - set(kappa)):
        raise VardropError(f"Expected `kappa` of every noisy layer, but got none for {missing}.")
    sampled = total = 0
    for layer_name, layer in layers.items():
        noise = {}
        for own, tensor in layer.noisy_tensors().items():
            noise[own] = dict(tensor.noise)
            if (name := tensor_name(layer_name, own)) in owner:  # a noisy bias keeps all of its own
                mask = kappa[owner[name]].abs() > threshold
                sampled, total = sampled + int(mask.sum()), total + mask.numel()
                noise[own][_MASK] = mask.expand_as(tensor.mean).to(tensor.mean.dtype)
        assert layer.posterior is not None
        layer.replace_posterior(MaskedNoise(layer.posterior), noise)
    return Selected(selected, sampled / total)


def _layers(net: nn.Module) -> dict[str, Variational]:
    layers = named_modules_of(net, Variational)
    found = {name: m for name, m in layers.items() if m.posterior is not None}
    if not found:
        raise VardropError(
            "Expected noisy weights to select from, but got none. Convert the net with a posterior."
        )
    return found


def _owners(net: nn.Module) -> dict[str, str]:
    """The name under which each noisy weight is counted: that of the first of tied ones."""
    means = {name: tensor.mean for name, _, tensor in noisy_weights(net)}
    first = {id(mean): name for name, mean in reversed(means.items())}
    return {name: first[id(mean)] for name, mean in means.items()}


@restore_state_on_error
def unlabelled_kappa(
    net: nn.Module | Objective,
    x: Tensor,
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    counted: Tensor | None = None,
) -> dict[str, Tensor]:
    """kappa of every noisy weight by layer name, averaged over rows, draws and y ~ p(y | x, w).

    The expected Hessian is minus the Fisher matrix, whose diagonal needs first derivatives only. A
    tied weight counts once, under the first name.

    Args:
        net: a net with noisy weights, or an ELBO with it.
        x: inputs (N, ...).
        likelihood: of the output; that of the ELBO, or `Categorical()`.
        seed: makes the draws repeatable.
        counted: which targets (N, ...) count; all by default.
    """
    model, meaning = resolve_likelihood(net, likelihood)
    quiet = make_eval_copy(model, noise=False)
    _layers(quiet)
    owner = _owners(quiet)
    weights = {name: (key, t) for name, key, t in noisy_weights(quiet) if owner[name] == name}
    keys, tensors = [key for key, _ in weights.values()], [t for _, t in weights.values()]

    def curvature(leaves: Sequence[Tensor]) -> list[Tensor]:
        given = clone_batch(plain_batch(x))
        args, kwargs = call_arguments(quiet, given)
        output = output_tensor(
            functional_call(quiet, dict(zip(keys, leaves, strict=True)), args, kwargs)
        )
        score = _score(output.detach(), meaning, counted)
        return [-f / num_examples(x) for f in diagonal_fisher(output, leaves, score, _PROBES)]

    with torch.enable_grad(), draw_from(GeneratorNoise(resolve_seed(seed))):
        variances = [t.variance().detach().expand_as(t.mean) for t in tensors]

        def draw() -> list[Tensor]:
            return [t.sample(t.draw()).detach() for t in tensors]

        values = kappa_of(variances, draw, curvature, _DRAWS)
    return dict(zip(weights, values, strict=True))


def diagonal_fisher(
    output: Tensor, tensors: Sequence[Tensor], score: Callable[[], Tensor], probes: int = 32
) -> list[Tensor]:
    """An unbiased estimate of the diagonal of the Fisher matrix, summed over rows, a tensor each.

    E (d log p(y | output) / dt_i)^2 with y drawn from the model itself. It equals minus the
    expected Hessian of log p, and needs first derivatives only. The scores of different rows are
    independent and have mean zero, so the square of their summed gradient has the expectation of
    the sum of their squares: one backward pass per probe.

    Args:
        output: the net's output, rows first, with its graph.
        tensors: leaves that require a gradient.
        score: draws d log p(y | output) / d output for a fresh y, in the shape of `output`.
        probes: how many draws are averaged; the relative error falls as sqrt(2 / probes).

    >>> import torch
    >>> w = torch.tensor([3.0], requires_grad=True)
    >>> diagonal_fisher(w * torch.tensor([[2.0]]), [w], lambda: torch.ones(1, 1), probes=1)
    [tensor([4.])]
    """
    totals = [torch.zeros_like(t) for t in tensors]
    for _ in range(probes):
        gradients = torch.autograd.grad(
            output, tensors, score(), retain_graph=True, materialize_grads=True
        )
        for total, gradient in zip(totals, gradients, strict=True):
            total.add_(gradient.square(), alpha=1 / probes)
    return totals


def _score(output: Tensor, likelihood: Likelihood, counted: Tensor | None) -> Callable[[], Tensor]:
    """Draws d log p(y | output) / d output for y from the model."""

    def score() -> Tensor:
        leaf = output.clone().requires_grad_()
        density = likelihood.log_density(leaf.unsqueeze(0), likelihood.sample(output))
        density = density if counted is None else density.where(counted, 0)
        return torch.autograd.grad(density.sum(), leaf)[0]

    return score
