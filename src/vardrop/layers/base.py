"""What every layer with noisy weights shares: tensors, the switch, the KL.

A noisy layer *is* the torch layer of its name: `weight` is the posterior mean, `bias` the bias, and
the noise tensors stand beside them, so a plain checkpoint loads and mean mode is the torch layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vardrop.checks import check_type
from vardrop.divergence import check_kl, kl_divergence
from vardrop.errors import VardropError
from vardrop.estimators import Affine, Estimator, check_estimator, local_reparameterization
from vardrop.functional import AdditiveWeights, Product, shared_weights, square, wide
from vardrop.gates import FeatureNoise, Gate, Side
from vardrop.layers.folding import fold
from vardrop.noisy import Noisy, Relevance
from vardrop.posteriors import AdditiveGaussian, Axes, Posterior
from vardrop.priors import LogUniform, Prior

_Map = Callable[..., Tensor]
_BIAS_AXES = Axes(input=(), output=(0,))
_LOG_ALPHA = 3.0  # beyond it a weight is noise: a drop rate of 0.95 (Molchanov et al. 2017)


def check_method(posterior: Posterior | None, prior: Prior | None, estimator: Estimator) -> None:
    """Raise unless the parts fit together."""
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


class Variational(Noisy):
    """A torch layer whose weights have a posterior, and whose input may pass a gate."""

    axes: ClassVar[Axes]
    spatial: ClassVar[int] = 0  # axes behind the one that runs over units
    weight: Tensor
    bias: Any  # torch declares it a Tensor, though it may be None
    posterior: Posterior | None
    prior: Prior | None
    estimator: Estimator
    gate: Gate | None
    _names: tuple[tuple[str, ...], ...]

    @property
    def channel_axis(self) -> int:
        """Where the units run in the input and in the output."""
        return -1 - self.spatial

    @property
    def inputs(self) -> int:
        """How many input units a gate would act on."""
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """How many output units there are."""
        raise NotImplementedError

    def make_noisy(
        self,
        posterior: Posterior | None = None,
        prior: Prior | None = None,
        estimator: Estimator = local_reparameterization,
        gate: FeatureNoise | None = None,
        noisy_bias: bool = False,
        tied: dict[str, Tensor] | None = None,
    ) -> None:
        """Register the tensors of the method on a layer that is a plain torch layer so far.

        `tied` gives noise tensors of another module with the same weight, to be shared.
        """
        check_method(posterior, prior, estimator)
        check_type("gate", gate, FeatureNoise | None, "a FeatureNoise such as BinaryDropout()")
        self.posterior, self.prior, self.estimator = posterior, prior, estimator
        self.gate = None
        if gate is not None:
            side = gate.side(self.spatial)
            units = self.inputs if side == "input" else self.outputs
            self.gate = Gate(gate, units, self.channel_axis, side).to(wide(self.weight))
            self.gate.train(self.training)
        names: list[tuple[str, ...]] = [(), (), (), ()]
        if posterior is not None:
            names[0] = self._own(posterior.initial(self.weight, self.axes), posterior.learned, tied)
            names[1] = self._own(prior.initial(self.weight), prior.learned) if prior else ()
        if posterior is not None and noisy_bias and self.bias is not None:
            noise = {f"bias_{k}": v for k, v in posterior.initial(self.bias, _BIAS_AXES).items()}
            names[2] = self._own(noise, posterior.learned)
            start = prior.initial(self.bias) if prior else {}
            names[3] = self._own(
                {f"bias_{k}": v for k, v in start.items()}, bool(prior and prior.learned)
            )
        self._names = tuple(names)
        self.noisy_bias = noisy_bias and self.bias is not None and posterior is not None
        self._centre()

    def _centre(self) -> None:
        """Keep the means of a zero-mean posterior at zero, whatever was loaded."""
        if self.posterior is None or not self.posterior.zero_mean:
            return
        for mean in (self.weight, self.bias if self.noisy_bias else None):
            if mean is not None:
                with torch.no_grad():
                    mean.zero_()
                mean.requires_grad_(False)

    def _own(
        self, tensors: dict[str, Tensor], learned: bool, tied: dict[str, Tensor] | None = None
    ) -> tuple[str, ...]:
        for name, start in tensors.items():
            shared = (tied or {}).get(name)
            value = shared if shared is not None and shared.shape == start.shape else start
            if learned:
                self.register_parameter(
                    name, value if isinstance(value, nn.Parameter) else nn.Parameter(value)
                )
            else:
                self.register_buffer(name, value)
        return tuple(tensors)

    def make_plain(self) -> None:
        """Drop every noise tensor; the means stay, with the gate's mean folded into them."""
        if self.gate is not None:
            fold(self.gate, self.weight, self.bias, self.axes)
        for names in self._names:
            for name in names:
                delattr(self, name)
        if self.posterior is not None and self.posterior.zero_mean:
            self.weight.requires_grad_(True)
            if self.noisy_bias and self.bias is not None:
                self.bias.requires_grad_(True)
        for attribute in ("posterior", "prior", "estimator", "gate", "_names", "noisy_bias"):
            delattr(self, attribute)
        self.__dict__.pop("sampling", None)

    def _tensors(self, which: int) -> dict[str, Tensor]:
        prefix = "bias_" if which >= 2 else ""
        return {name.removeprefix(prefix): getattr(self, name) for name in self._names[which]}

    def _shared_weights(self) -> AdditiveWeights | None:
        if type(self.posterior) is not AdditiveGaussian or self.prior != LogUniform():
            return None
        return shared_weights(self.weight, self._tensors(0)["log_sigma2"])

    def _affine(self, op: _Map, product: Product | None) -> Affine:
        assert self.posterior is not None
        shared = self._shared_weights()
        return Affine(
            op=op,
            posterior=self.posterior,
            axes=self.axes,
            weight=self.weight if shared is None else shared.mean,
            tensors=self._tensors(0),
            bias=self.bias,
            bias_tensors=self._tensors(2) if self.noisy_bias else None,
            outputs=self.outputs,
            trailing=self.spatial,
            squares=self._squares,
            channel_axis=self.channel_axis,
            product=product,
            variance=None if shared is None else shared.variance,
        )

    def _squares(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(square(x) for x in inputs)

    def _gated(self, side: Side, x: Tensor) -> Tensor:
        return self.gate(x) if self.gate is not None and self.gate.side == side else x

    def _run(self, op: _Map, inputs: Any, noise: Any, product: Product | None = None) -> Tensor:
        if self.posterior is None or not (self.is_sampling or noise is not None):
            return op(*inputs, self.weight, self.bias)
        return self.estimator(self._affine(op, product), inputs, noise)

    def kl(self, value: bool = True) -> Tensor | None:
        own, gate = self._weight_kl(value), self.gate
        extra = None if gate is None else gate.weight_kl(self.weight)
        return own if extra is None else extra if own is None else own + extra

    def _weight_kl(self, value: bool) -> Tensor | None:
        if self.posterior is None or self.prior is None:
            return None
        shared = self._shared_weights()
        total = shared.kl(value) if shared is not None else kl_divergence(
            self.posterior, self.prior, self.weight, self.axes,
            self._tensors(0), self._tensors(1), value,
        )  # fmt: skip
        if self.noisy_bias and self.bias is not None:
            total = total + kl_divergence(
                self.posterior, self.prior, self.bias, _BIAS_AXES,
                self._tensors(2), self._tensors(3), value,
            )  # fmt: skip
        return total

    def kl_key(self) -> Hashable:
        own = {**self._tensors(0), **self._tensors(2)}
        return (id(self.weight), *sorted(id(t) for t in own.values())) if own else id(self)

    def get_log_alpha(self) -> Tensor | None:
        if self.posterior is None:
            return None
        return self.posterior.log_alpha(self.weight, self._tensors(0))

    def relevance(self) -> Relevance | None:
        if self.posterior is None or self.posterior.zero_mean or not self.posterior.learned:
            return None
        log_alpha = self.posterior.log_alpha(self.weight, self._tensors(0))
        return Relevance(log_alpha.expand_as(self.weight), _LOG_ALPHA, False, "weight")

    @torch.no_grad()
    def draw_weight(self) -> Tensor:
        """One draw of the weight, as all inputs of a batch would see it, without a gradient."""
        if self.posterior is None:
            return self.weight
        noise = self.posterior.draw(self.weight, self.axes)
        return self.posterior.sample(self.weight, noise, self._tensors(0))

    def variance(self) -> Tensor:
        """Var w of every weight, in the shape of `weight`."""
        if self.posterior is None:
            return torch.zeros_like(self.weight)
        return self.posterior.variance(self.weight, self._tensors(0)).expand_as(self.weight)

    def noise_tensors(self) -> Iterator[Tensor]:
        for names in self._names:
            for name in names:
                if isinstance(tensor := getattr(self, name), nn.Parameter):
                    yield tensor

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # A plain checkpoint brings means; a zero-mean layer has none.
        self._centre()

    def extra_repr(self) -> str:
        parts = (
            f"{k}={v!r}" for k, v in vars(self).items() if k in ("posterior", "prior", "estimator")
        )
        return ", ".join([super().extra_repr(), *parts])
