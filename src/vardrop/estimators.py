"""Estimators: how the output of a noisy affine map is drawn. All have the same marginal mean.

| estimator                  | noise                          | output covariance between examples |
|----------------------------|--------------------------------|------------------------------------|
| `weight_sample`            | one weight draw per batch      | yes                                |
| `per_example`              | one weight draw per example    | no                                 |
| `local_reparameterization` | one normal number per output   | no                                 |
| `flipout`                  | one draw, signs per example    | none (uncorrelated)                |

Noise can be passed explicitly. The same noise gives the same output and the same gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vardrop._core.checks import check_type, describe_value
from vardrop._core.errors import VardropError
from vardrop._core.values import Value
from vardrop.divergence import check_kl
from vardrop.functional import gaussian_output, keep_layout, normal_like, random_signs
from vardrop.functional.noise import in_autocast, local_output
from vardrop.noisy import NoisyTensor
from vardrop.posteriors import Posterior
from vardrop.priors import Prior

WeightNoise = tuple[Tensor, Tensor | None]  # of the weight, and of the bias if it is noisy
FlipoutNoise = tuple[WeightNoise | None, Tensor | None, Tensor | None]  # and the signs r and s
ExplicitNoise = Tensor | WeightNoise | FlipoutNoise  # each estimator takes one of them


@dataclass(frozen=True, eq=False)
class AffineMap:
    """A multilinear map `op(inputs, weight, bias)` with a noisy weight.

    Args:
        op: linear in each input and in the weight.
        weight: its distribution.
        bias: its distribution, or a tensor without noise.
        outputs: the number of output units.
        trailing: the number of output axes after the channels (0 for Linear, 2 for Conv2d).
    """

    op: Callable[..., Tensor]
    weight: NoisyTensor
    bias: NoisyTensor | Tensor | None
    outputs: int
    trailing: int

    @property
    def mean_bias(self) -> Tensor | None:
        """E b."""
        return self.bias.mean if isinstance(self.bias, NoisyTensor) else self.bias

    @property
    def precision(self) -> torch.dtype:
        """The dtype of products of this map: the dtype of autocast, or else of the weight."""
        mean = self.weight.mean
        kind = mean.device.type
        return torch.get_autocast_dtype(kind) if in_autocast(kind) else mean.dtype

    def moments(
        self,
        inputs: tuple[Tensor, ...],
        variances: tuple[Tensor, Tensor],
        spread: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute E y and Var y of every output.

            E y = op(m, M) + E b,   Var y = op(m^2 + v, V) + op(v, M^2) + Var b

        for a weight with mean M and variance V and an input with mean m and variance v.

        Args:
            inputs: m.
            variances: V and Var b, from `variances(floor)`.
            spread: v, for a map of one input. None means zero.

        Returns:
            The mean, or None if it is zero without a product, and the variance.

        Kingma, Salimans & Welling 2015, eq. 6; Wang & Manning 2013, sec. 3.
        """
        mean = self.weight.mean
        half = self.precision == torch.float16  # its smallest number is 6e-8: variances vanish
        dtype = torch.float32 if half else mean.dtype
        with torch.autocast(mean.device.type, enabled=False) if half else nullcontext():
            wide = [x.float() if half and x.is_floating_point() else x for x in inputs]
            # An input that is no number is an index.
            squares = [keep_layout(x * x, x) if x.is_floating_point() else x for x in wide]
            if spread is not None:
                squares[0] = squares[0] + spread
            variance = self.op(*squares, *(v.to(dtype) for v in variances))
            if spread is not None and not self.weight.posterior.zero_mean:
                variance = variance + self.op(spread, mean.square(), None)
        return self.mean_output(inputs), variance

    def mean_output(self, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """The output for the mean weights, or None if it is zero without a product.

        Args:
            inputs: of the product.

        Returns:
            The output, or None.
        """
        bias = self.mean_bias
        if not self.weight.posterior.zero_mean:
            return self.op(*inputs, self.weight.mean, bias)
        return None if bias is None else bias.view(-1, *(1,) * self.trailing)

    def variances(self, floor: float = 0.0) -> tuple[Tensor, Tensor]:
        """The variance of the weight, and the variance of the bias + floor.

        Args:
            floor: is added to the variance of the bias.

        Returns:
            Both variances.
        """
        variance = self.weight.variance()
        bias = variance.new_full((self.outputs,), floor)
        if isinstance(self.bias, NoisyTensor):
            bias = bias + self.bias.variance()
        return keep_layout(variance, self.weight.mean), bias

    def draw(self, batch: tuple[int, ...] = (), noise: ExplicitNoise | None = None) -> WeightNoise:
        """Standard noise for the weight, and for the bias if it is noisy.

        Args:
            batch: the shape of the batch of draws.
            noise: explicit noise of both, which is checked and returned. None draws it.

        Returns:
            The noise.
        """
        if noise is None:
            bias = self.bias.draw(batch) if isinstance(self.bias, NoisyTensor) else None
            return self.weight.draw(batch), bias
        if isinstance(noise, Tensor) or len(noise) != 2:
            raise _wrong_noise("(noise of the weight, noise of the bias or None)", noise)
        return noise

    def sample(self, noise_w: Tensor, noise_b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for given noise. A bias without noise is its mean.

        Args:
            noise_w: the noise of the weight.
            noise_b: the noise of the bias, or None.

        Returns:
            Weight and bias.
        """
        weight = keep_layout(self.weight.sample(noise_w), self.weight.mean)
        if isinstance(self.bias, NoisyTensor) and noise_b is not None:
            return weight, self.bias.sample(noise_b)
        return weight, self.mean_bias


@dataclass(frozen=True)
class Estimator(Value, ABC):
    """Draws the output of an `AffineMap`."""

    # What one draw of whole weight tensors is used for. None if no weights are drawn.
    whole_weights_per: ClassVar[Literal["batch", "example"] | None] = "batch"

    def unsupported_reason(self, posterior: Posterior) -> str | None:
        """Why this estimator does not support a posterior, or None if it does.

        Args:
            posterior: of the weights.

        Returns:
            The reason, or None.
        """
        return None

    @abstractmethod
    def __call__(
        self, affine: AffineMap, inputs: tuple[Tensor, ...], noise: ExplicitNoise | None = None
    ) -> Tensor:
        """Draw the output. With `noise=None` the noise is drawn as well."""


@dataclass(frozen=True)
class WeightSample(Estimator):
    """y = op(x, w) with one draw of w for the whole batch, noise = (weight noise, bias noise).

    Blundell et al. 2015, sec. 3.2.
    """

    def __call__(
        self, affine: AffineMap, inputs: tuple[Tensor, ...], noise: ExplicitNoise | None = None
    ) -> Tensor:
        return affine.op(*inputs, *affine.sample(*affine.draw(noise=noise)))


@dataclass(frozen=True)
class PerExample(Estimator):
    """y_n = op(x_n, w_n) with one weight draw per example (axis 0 of the input).

    The reference for other estimators. A batch of B needs B weight tensors.
    """

    whole_weights_per: ClassVar[Literal["batch", "example"] | None] = "example"

    def __call__(
        self, affine: AffineMap, inputs: tuple[Tensor, ...], noise: ExplicitNoise | None = None
    ) -> Tensor:
        noise_w, noise_b = affine.draw((inputs[0].shape[0],), noise)
        weight, bias = affine.sample(noise_w, noise_b)

        def one(weight: Tensor, bias: Tensor | None, *example: Tensor) -> Tensor:
            return affine.op(*(x.unsqueeze(0) for x in example), weight, bias).squeeze(0)

        bias_axis = None if noise_b is None else 0
        return torch.vmap(one, in_dims=(0, bias_axis, *(0,) * len(inputs)))(weight, bias, *inputs)


@dataclass(frozen=True)
class LocalReparameterization(Estimator):
    """y ~ N(op(x, E w), op(x^2, Var w)), drawn per output. Noise has the shape of the output.

    Exact for Gaussian weights of a dense layer on inputs (N, features). If a weight serves several
    positions of an example (a kernel, a dense layer over tokens, a tied weight), it keeps the
    marginals and drops the covariance between positions.

    With other noise (signs, masks) outputs are normal only in the limit of a large fan-in: with
    three inputs a sum of signs takes four values. Such a posterior raises an error, unless
    `central_limit=True` requests that approximation, which keeps mean and variance. One mask for
    several weights of an output always raises an error, because the variance would be wrong too.

    Args:
        floor: added to the variance, so that its square root has a gradient at x = 0.
        central_limit: whether weights that are not normal are treated as normal.

    Kingma, Salimans & Welling 2015, eq. 6; Wang & Manning 2013, "Fast dropout training", sec. 3
    (the limit).
    """

    floor: float = 1e-8
    central_limit: bool = False
    whole_weights_per: ClassVar[Literal["batch", "example"] | None] = None
    positive: ClassVar[tuple[str, ...]] = ("floor",)

    def unsupported_reason(self, posterior: Posterior) -> str | None:
        """Weights must be independent normal numbers, unless `central_limit`."""
        if posterior.gaussian:
            return None
        if posterior.noise_per != "weight":
            return (
                "local reparameterisation needs weights with independent noise, which "
                f"{posterior!r} does not have or does not declare in `noise_per`"
            )
        if self.central_limit:
            return None
        return (
            f"local reparameterisation draws normal outputs, and the weights of {posterior!r} are "
            "not normal; vardrop.estimators.LocalReparameterization(central_limit=True) treats "
            "them as normal, which a large fan-in justifies"
        )

    def __call__(
        self, affine: AffineMap, inputs: tuple[Tensor, ...], noise: ExplicitNoise | None = None
    ) -> Tensor:
        if not isinstance(noise, Tensor | None):
            raise _wrong_noise("a tensor in the shape of the output", noise)
        variances = affine.variances(self.floor)
        if len(inputs) == 1 and not affine.weight.posterior.zero_mean:
            weights = affine.weight.mean, affine.mean_bias
            if (y := local_output(affine.op, inputs[0], weights, variances, noise)) is not None:
                return y
        mean, variance = affine.moments(inputs, variances)
        noise = normal_like(variance) if noise is None else noise.to(variance.dtype)
        if mean is None:
            return (variance.sqrt() * noise).to(affine.precision)
        mean = mean.to(variance.dtype).expand_as(variance)
        return gaussian_output(mean, variance, noise).to(affine.precision)


@dataclass(frozen=True)
class Flipout(Estimator):
    """y = op(x, E w) + s op(r x, dw): one perturbation dw per batch, signs r, s per example.

    noise = ((weight noise, bias noise), r, s). Needs noise with a symmetric distribution.

    Wen et al. 2018, "Flipout: efficient pseudo-independent weight perturbations", eq. 4.
    """

    def unsupported_reason(self, posterior: Posterior) -> str | None:
        """Noise must be symmetric."""
        if posterior.symmetric:
            return None
        return f"flipout flips signs, and the noise of {posterior!r} is not symmetric"

    def __call__(
        self, affine: AffineMap, inputs: tuple[Tensor, ...], noise: ExplicitNoise | None = None
    ) -> Tensor:
        if noise is not None and (isinstance(noise, Tensor) or len(noise) != 3):
            raise _wrong_noise("((noise of the weight, noise of the bias or None), r, s)", noise)
        mean = affine.mean_output(inputs)
        draw, sign_in, sign_out = (None, None, None) if noise is None else noise
        noise_w, noise_b = affine.draw(noise=draw)
        change = keep_layout(affine.weight.perturbation(noise_w), affine.weight.mean)
        weight, bias = change.to(affine.weight.mean.dtype), None
        if isinstance(affine.bias, NoisyTensor) and noise_b is not None:
            bias = affine.bias.perturbation(noise_b).to(affine.bias.mean.dtype)
        x, *rest = inputs
        if x.is_floating_point():
            x = _flip(x, sign_in, affine.trailing)
        y = _flip(affine.op(x, *rest, weight, bias), sign_out, affine.trailing)
        return y if mean is None else mean + y


def _flip(x: Tensor, signs: Tensor | None, trailing: int) -> Tensor:
    """x times one sign per example and channel. `None` draws them."""
    if signs is None:
        signed = (0, x.dim() - 1 - trailing)
        signs = random_signs(tuple(n if i in signed else 1 for i, n in enumerate(x.shape)), x)
    return x * signs


def _wrong_noise(wanted: str, noise: ExplicitNoise) -> VardropError:
    return VardropError(f"Expected `noise` to be {wanted}, but got {describe_value(noise)}.")


def check_estimator(estimator: Estimator, posterior: Posterior) -> None:
    """Raise unless the estimator can draw from the posterior.

    Args:
        estimator: how the noise is drawn.
        posterior: of the weights.
    """
    if reason := estimator.unsupported_reason(posterior):
        raise VardropError(
            f"Expected an estimator that fits the posterior, but {reason}. "
            "Use per_example or weight_sample."
        )


def check_method(posterior: Posterior | None, prior: Prior | None, estimator: Estimator) -> None:
    """Raise an error unless posterior, prior and estimator fit together.

    Args:
        posterior: of the weights, or None.
        prior: of the weights, or None.
        estimator: how the noise of the weights is drawn.
    """
    check_type("posterior", posterior, Posterior | None, "a Posterior or None")
    check_type("prior", prior, Prior | None, "a Prior or None")
    check_type("estimator", estimator, Estimator, "an Estimator such as vardrop.flipout")
    if prior is not None and posterior is None:
        raise VardropError(
            f"Expected `posterior` where there is a prior, but got None with {prior!r}. "
            "Give a posterior, or leave out the prior."
        )
    if posterior is not None:
        check_estimator(estimator, posterior)
        if prior is not None:
            check_kl(posterior, prior)


weight_sample = WeightSample()
per_example = PerExample()
local_reparameterization = LocalReparameterization()
flipout = Flipout()
