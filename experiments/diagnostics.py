"""Instruments of the experiments: gradient variance, noise after units, permuted variances."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from vardrop._core.calls import LabelledData, call_net, clone_batch, labelled_batches
from vardrop._core.checks import check_choice
from vardrop._core.errors import VardropError
from vardrop._core.modules import evaluating
from vardrop.estimators import Estimator, LocalReparameterization, check_estimator
from vardrop.layers import Variational
from vardrop.layers.alpha import spread_log_alpha
from vardrop.noisy import noisy_modules, sampling
from vardrop.posteriors import Axes, Posterior, Sharing, Tensors
from vardrop.prediction.kappa import (
    call_with_tensors,
    example_cross_entropy,
    mean_cross_entropy,
)

Net = TypeVar("Net", bound=nn.Module)
Loss = Callable[[Tensor, Tensor], Tensor]
Activation = Literal["identity", "relu", "abs"]


@dataclass(frozen=True)
class Estimate:
    """A mean over independent repetitions, with its standard error."""

    value: float
    standard_error: float
    repetitions: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's t interval around the value."""
        half = student_quantile(0.5 + level / 2, self.repetitions - 1) * self.standard_error
        return self.value - half, self.value + half

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.value:.3g} (95 %: {low:.3g} to {high:.3g})"


def student_quantile(probability: float, df: int) -> float:
    """Quantile of Student's t, below 1 % off from df 3 on (Abramowitz & Stegun 26.7.5).

    >>> round(student_quantile(0.975, 10), 2)
    2.23
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df ** (i + 1) for i, term in enumerate(terms))


@contextmanager
def drawing(net: nn.Module, estimator: Estimator | None) -> Iterator[nn.Module]:
    """Let every noisy layer draw by `estimator` for a while (None: each by its own)."""
    layers = [m for m in noisy_modules(net).values() if isinstance(m, Variational) and m.posterior]
    before = [m.estimator for m in layers]
    if estimator is not None:
        for m in layers:
            assert m.posterior is not None
            check_estimator(estimator, m.posterior)
    try:
        for m in layers:
            m.estimator = estimator or m.estimator
        yield net
    finally:
        for m, own in zip(layers, before, strict=True):
            m.estimator = own


def outputs(net: nn.Module, loader: LabelledData, repeats: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and targets batch by batch; buffers (BatchNorm's statistics) stay as they are."""
    size = 0
    for x, y in (pair for _ in range(repeats) for pair in labelled_batches(loader, "loader")):
        size = size or len(y)
        if len(y) != size:
            raise VardropError(
                f"Expected batches of one size, but got {size} and {len(y)}: the variance "
                "depends on it. Use drop_last=True."
            )
        copies = {name: b.clone() for name, b in net.named_buffers()}
        yield call_with_tensors(net, copies, x), y


@dataclass(frozen=True)
class LikelihoodCovariance:
    """Var of num_data * (mean loss of a batch), split by how it depends on the batch size.

    Var = num_data^2 (Var[L_i] / M + (M - 1) / M Cov[L_i, L_j])
        = falling + constant,   falling = num_data^2 (Var - Cov) / M,  constant = num_data^2 Cov
    """

    variance: Estimate  # Var[L_i] of one example, over data and noise
    covariance: Estimate  # Cov[L_i, L_j] of two examples of one batch
    batch_size: int
    num_data: int

    @property
    def falling(self) -> float:
        """The part that a larger batch reduces."""
        difference = self.variance.value - self.covariance.value
        return self.num_data**2 * difference / self.batch_size

    @property
    def constant(self) -> float:
        """The part that stays, whatever the batch."""
        return self.num_data**2 * self.covariance.value


@torch.no_grad()
def likelihood_covariance(
    net: nn.Module,
    loader: LabelledData,
    loss: Loss = example_cross_entropy,
    estimator: Estimator | None = None,
    num_data: int = 1,
    repeats: int = 1,
) -> LikelihoodCovariance:
    """Split the variance of the likelihood into what falls with the batch size and what does not.

    One-way analysis of variance with the batches (one noise draw each) as groups: the variance of
    the batch means and the variance inside batches give Cov[L_i, L_j] and Var[L_i], unbiased; the
    standard errors are jackknifed over batches.

    Args:
        net: a net with noisy modules.
        loader: shuffled batches (x, y) of one size M >= 2; at least three.
        loss: (output, target) -> one loss per example, (M,).
        estimator: how the layers draw; None leaves each layer its own.
        num_data: scale of the loss.
        repeats: passes over the loader.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayes_by_backprop())
    >>> data = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(6)]
    >>> likelihood_covariance(net, data).batch_size
    5

    Kingma, Salimans & Welling 2015, eq. 4 and 5.
    """
    means, within, size = [], [], 0
    with drawing(net, estimator), sampling(net):
        for output, y in outputs(net, loader, repeats):
            losses = loss(output, y).double()
            size = len(y)
            if losses.shape != (size,) or size < 2:
                raise VardropError(
                    f"Expected `loss` to give one value for each of two or more examples, but got "
                    f"shape {tuple(losses.shape)} for {size}. Use reduction='none'."
                )
            means.append(losses.mean())
            within.append(losses.var())
    if len(means) < 3:
        raise VardropError(f"Expected `loader` to yield at least 3 batches, but got {len(means)}.")
    covariance, variance = _components(torch.stack(means), torch.stack(within), size)
    return LikelihoodCovariance(variance, covariance, size, num_data)


def _components(means: Tensor, within: Tensor, size: int) -> tuple[Estimate, Estimate]:
    def both(means: Tensor, within: Tensor) -> Tensor:
        covariance = means.var() - within.mean() / size
        return torch.stack([covariance, covariance + within.mean()])

    count = len(means)
    kept = [torch.arange(count) != i for i in range(count)]
    left_out = torch.stack([both(means[k], within[k]) for k in kept])
    error = (left_out.var(0) * (count - 1) ** 2 / count).sqrt()
    value = both(means, within)
    covariance, variance = (
        Estimate(v, e, count) for v, e in zip(value.tolist(), error.tolist(), strict=True)
    )
    return covariance, variance


def gradient_variance(
    net: nn.Module,
    loader: LabelledData,
    loss: Loss = mean_cross_entropy,
    estimator: Estimator | None = None,
    noise: bool = True,
    num_data: int = 1,
    repeats: int = 1,
) -> dict[str, Estimate]:
    """Variance of the stochastic gradient, averaged over the elements of each parameter.

        V = E 1/(2J) ||g - g'||^2,   g, g' gradients of num_data * mean loss of two mini-batches

    Every pair of consecutive batches, each with noise of its own, gives one independent value;
    their mean is unbiased and their spread gives the interval. Two gradients are held at a time.

    Args:
        net: a net with noisy modules; its mode, gradients and buffers stay as they are.
        loader: shuffled batches (x, y) of one size; needs four batches in all.
        loss: mean loss of an example of a batch, (output, target) -> scalar.
        estimator: how the layers draw; None leaves each layer its own.
        noise: False measures the variance of the data alone.
        num_data: scale of the loss; the training-set size gives the scale of the paper.
        repeats: passes over the loader.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.bayes_by_backprop())
    >>> data = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(6)]
    >>> gradient_variance(net, data, estimator=vd.flipout)["weight"].repetitions
    3

    Kingma, Salimans & Welling 2015, table 1.
    """
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    squares: dict[str, list[float]] = {name: [] for name in parameters}
    previous: tuple[Tensor, ...] | None = None
    with drawing(net, estimator), sampling(net, on=noise), torch.enable_grad():
        for output, y in outputs(net, loader, repeats):
            gradients = torch.autograd.grad(
                num_data * loss(output, y),
                list(parameters.values()),
                allow_unused=True,
                materialize_grads=True,
            )
            if previous is None:
                previous = gradients
                continue
            for name, g, other in zip(parameters, gradients, previous, strict=True):
                squares[name].append(0.5 * (g - other).square().mean().item())
            previous = None
    return {name: _estimate(values) for name, values in squares.items()}


def _estimate(values: list[float]) -> Estimate:
    if len(values) < 2:
        raise VardropError(
            f"Expected `loader` to yield at least 4 batches, but got {len(values)} pairs of them. "
            "Use smaller batches, or more repeats."
        )
    sample = torch.tensor(values, dtype=torch.float64)
    return Estimate(sample.mean().item(), (sample.std() / len(sample) ** 0.5).item(), len(sample))


def activation_alpha(mean: Tensor, std: Tensor, activation: Activation = "relu") -> Tensor:
    """Var f(y) / (E f(y))^2 for y ~ N(mean, std^2): the alpha of equivalent Gaussian dropout.

        ReLU: E f = mean Phi(r) + std phi(r),  E f^2 = (mean^2 + std^2) Phi(r) + mean std phi(r)
        abs:  E f = mean erf(r / sqrt 2) + 2 std phi(r),  E f^2 = mean^2 + std^2,   r = mean / std

    Noise of mean zero still tells something after a non-linearity: alpha is pi/2 - 1 after |.|
    and pi - 1 after ReLU, whatever the scale.

    Args:
        mean, std: moments of the pre-activation, of one shape; std > 0.
        activation: "identity", "relu" or "abs".

    >>> import torch
    >>> activation_alpha(torch.zeros(1), torch.ones(1), "abs")
    tensor([0.5708])
    >>> activation_alpha(torch.zeros(1), torch.ones(1), "relu")
    tensor([2.1416])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """
    check_choice("activation", activation, get_args(Activation))
    kind = mean.dtype
    mean, std = mean.double(), std.double()  # the tails cancel
    r = mean / std
    density = torch.exp(-0.5 * r.square()) / math.sqrt(2 * math.pi)
    if activation == "relu":
        below = torch.special.ndtr(r)
        first = mean * below + std * density
        second = (mean.square() + std.square()) * below + mean * std * density
    elif activation == "abs":
        first = mean * torch.erf(r / math.sqrt(2)) + 2 * std * density
        second = mean.square() + std.square()
    else:
        first, second = mean, mean.square() + std.square()
    alpha = (second - first.square()) / first.square()
    return torch.where(first == 0, math.inf, alpha).to(kind)


@torch.no_grad()
def noise_level(net: nn.Module, x: Tensor, activation: Activation = "relu") -> dict[str, Tensor]:
    """alpha of every noisy layer's output after a non-linearity, on the inputs x.

    Each layer sees the input that one noisy pass gives it; its own output is taken as normal with
    the moments of its posterior (`activation_alpha`).

    Args:
        net: a net with noisy weights.
        x: a batch of inputs.
        activation: the non-linearity that follows the layers.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2, bias=False), vd.variance_layer())
    >>> noise_level(net, torch.ones(1, 3))[""]
    tensor([[2.1416, 2.1416]])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """
    check_choice("activation", activation, get_args(Activation))
    levels: dict[str, Tensor] = {}
    layers = {
        name: m
        for name, m in noisy_modules(net).items()
        if isinstance(m, Variational) and m.posterior is not None
    }

    def record(name: str, layer: Variational, inputs: tuple[Any, ...]) -> None:
        mean, std = _moments(layer, inputs)
        levels[name] = activation_alpha(mean, std, activation)

    handles = [
        layer.register_forward_pre_hook(lambda m, args, name=name: record(name, m, args))
        for name, layer in layers.items()
    ]
    try:
        with evaluating(net), sampling(net):
            call_net(net, clone_batch(x))
    finally:
        for handle in handles:
            handle.remove()
    return levels


def _moments(layer: Variational, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a layer's output, read off two explicit noises, 0 and 1."""
    own, tensors = layer.estimator, list(layer.noisy_tensors().values())
    if len(layer.weight_axes) > 1:
        raise VardropError(
            f"Expected layers that are one product, but got {type(layer).__name__} with the "
            f"weights {', '.join(layer.weight_axes)}. Convert the others alone, with `include`."
        )
    if not all(t.posterior.adds_variances(t.mean, t.axes) for t in tensors):
        raise VardropError(
            "Expected weights with independent noise, whose variances add up, but got "
            f"{layer.posterior!r}. Use another posterior or a dense layer."
        )
    zero = tensors[0].mean.new_zeros(())
    try:
        layer.estimator = LocalReparameterization(floor=1e-20)
        with sampling(layer, on=False):  # a gate passes its mean
            mean = layer.forward(*inputs, noise=zero)
            return mean, layer.forward(*inputs, noise=zero + 1) - mean
    finally:
        layer.estimator = own


@dataclass(frozen=True, eq=False)
class PermutationTest:
    """A score of the net itself, and of copies with permuted variances."""

    before: float
    after: Tensor  # one score per permutation

    @property
    def drop(self) -> float:
        """What permuting costs on average."""
        return self.before - self.after.mean().item()

    def __str__(self) -> str:
        spread = self.after.std().item() if len(self.after) > 1 else 0.0
        return f"{self.before:.4f} -> {self.after.mean().item():.4f} +- {spread:.4f}"


@dataclass(frozen=True)
class Permuted(Posterior):
    """Another posterior whose deviations are shuffled among the weights of a layer.

    w_i = E w_i + (w_p(i) - E w_p(i)) with a permutation p that the seed fixes.

    >>> import torch, vardrop as vd
    >>> q = Permuted(vd.AdditiveGaussian(), seed=0)
    >>> q.variance(torch.zeros(3), {"log_sigma2": torch.arange(3.0).log()}).sort().values
    tensor([0., 1., 2.])
    """

    posterior: Posterior
    seed: int

    @property
    def gaussian(self) -> bool:
        """As the inner posterior says."""
        return self.posterior.gaussian

    @property
    def noise_per(self) -> Sharing | None:
        """As the inner posterior says."""
        return self.posterior.noise_per

    @property
    def zero_mean(self) -> bool:
        """As the inner posterior says."""
        return self.posterior.zero_mean

    @property
    def symmetric(self) -> bool:
        """As the inner posterior says."""
        return self.posterior.symmetric

    def _shuffle(self, values: Tensor, weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(weight.numel(), generator=generator).to(values.device)
        batch = values.shape[: values.dim() - weight.dim()]
        full = values.expand(*batch, *weight.shape)
        return full.flatten(len(batch))[..., order].view_as(full)

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return self.posterior.initial(weight, axes)

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self._shuffle(self.posterior.variance(weight, tensors), weight)

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        return self.posterior.draw(weight, axes, batch)

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return self._shuffle(self.posterior.perturbation(weight, noise, tensors), weight)

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.variance(weight, tensors).log() - weight.square().log()


def permute_variances(net: Net, generator: torch.Generator | None = None) -> Net:
    """A copy of a net with the weight variances of every layer shuffled among its weights.

    The means stay where they are. Where the noise holds no information beyond its level, nothing
    is lost; a variance net loses everything. The copy is for evaluation: its layers have no prior.

    Args:
        net: a net with noisy weights; stays as it is.
        generator: of the permutations; torch's global one where None.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variance_layer())
    >>> sorted(permute_variances(net).variance().flatten()) == sorted(net.variance().flatten())
    True

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    shuffled = copy.deepcopy(net)
    seeds: dict[Hashable, int] = {}  # tied layers share their permutation
    for layer in noisy_modules(shuffled).values():
        if isinstance(layer, Variational) and layer.posterior is not None:
            fresh = int(torch.randint(2**62, (), generator=generator))
            seed = seeds.setdefault(layer.kl_key(), fresh)
            layer.posterior, layer.prior = Permuted(layer.posterior, seed), None
    if not seeds:
        raise VardropError(
            "Expected `net` to have noisy weights, but got gates or heads only. "
            "Convert it with a posterior, such as vardrop.sparse_vd()."
        )
    return shuffled


def permutation_test(
    net: nn.Module,
    score: Callable[[nn.Module], float],
    permutations: int = 5,
    generator: torch.Generator | None = None,
) -> PermutationTest:
    """Score a net before and after permuting its variances, over several permutations.

    Args:
        net: a net with noisy weights; stays as it is.
        score: what to measure, such as the ensemble accuracy on a test set.
        permutations: how many.
        generator: of the permutations; torch's global one where None.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.variance_layer())
    >>> permutation_test(net, lambda net: net.variance().sum().item()).after.shape
    torch.Size([5])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    after = [score(permute_variances(net, generator)) for _ in range(permutations)]
    return PermutationTest(score(net), torch.tensor(after, dtype=torch.float64))


@dataclass(frozen=True)
class Accuracies:
    """Fractions of right answers of one classifier, predicted in three ways."""

    deterministic: float  # the mean weights
    sample: float  # one draw, averaged over the draws
    ensemble: float  # the average of the draws' probabilities


@dataclass(frozen=True)
class Transition:
    """Fractions of the weights by alpha, and accuracies that tell whether means still matter."""

    below_one: float  # alpha < 1: the mean dominates
    between: float  # 1 <= alpha < exp(3)
    above: float  # alpha >= exp(3): the noise dominates
    accuracies: Accuracies

    def __str__(self) -> str:
        a = self.accuracies
        return (
            f"alpha < 1: {self.below_one:.1%}, 1..e^3: {self.between:.1%}, "
            f">= e^3: {self.above:.1%} | accuracy det {a.deterministic:.2%}, "
            f"sample {a.sample:.2%}, ensemble {a.ensemble:.2%}"
        )


@torch.no_grad()
def accuracies(net: nn.Module, loader: LabelledData, samples: int = 20) -> Accuracies:
    """Accuracy of a noisy classifier by its mean weights, by one draw, and by an ensemble.

        ensemble: argmax of 1/S sum_s softmax(net(x; w_s)),  w_s ~ q

    BatchNorm uses its running statistics throughout.

    Args:
        net: a net with noisy modules; output (N, C).
        loader: batches (x, y) with class indices y.
        samples: draws S.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 2), vd.variance_layer())
    >>> x, y = torch.eye(2), torch.tensor([0, 1])
    >>> accuracies(net, [(x, y)], samples=3).sample <= 1
    True
    """
    right, count = torch.zeros(3, dtype=torch.float64), 0
    with evaluating(net):
        for x, y in labelled_batches(loader, "loader"):
            with sampling(net, on=False):
                mean = call_net(net, clone_batch(x))
            if y.shape != mean.shape[:-1]:
                raise VardropError(
                    f"Expected class indices of shape {tuple(mean.shape[:-1])} in `loader`, but "
                    f"got {tuple(y.shape)}: broadcasting would mix examples. Reshape them."
                )
            with sampling(net):
                draws = torch.stack(
                    [call_net(net, clone_batch(x)).softmax(-1) for _ in range(samples)]
                )
            right[0] += (mean.argmax(-1) == y).sum()
            right[1] += (draws.argmax(-1) == y).sum() / samples
            right[2] += (draws.mean(0).argmax(-1) == y).sum()
            count += len(y)
    if count == 0:
        raise VardropError("Expected `loader` to yield batches, but got none.")
    return Accuracies(*(right / count).tolist())


def transition(net: nn.Module, loader: LabelledData, samples: int = 20) -> Transition:
    """The state of a net between dropout and variance net; call it after every epoch to log it.

    A variance net has large alphas, a deterministic accuracy at chance and a good ensemble; a
    sparse net has large alphas too, but keeps its deterministic accuracy.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 2), vd.variational_dropout(per="layer"))
    >>> transition(net, [(torch.eye(2), torch.tensor([0, 1]))], samples=2).between
    1.0

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 5.
    """
    found = spread_log_alpha(net)
    flat = torch.cat([la.flatten().double() for la in found.values()])
    below, above = (flat < 0).double().mean().item(), (flat >= 3).double().mean().item()
    return Transition(below, 1 - below - above, above, accuracies(net, loader, samples))
