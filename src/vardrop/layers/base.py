"""What every layer with noisy weights shares: tensors, the switch, the KL.

A noisy layer *is* the torch layer of its name: `weight` is the posterior mean, `bias` the bias, and
the noise tensors stand beside them, so a plain checkpoint loads and mean mode is the torch layer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator
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
from vardrop.noisy import KLTerms, Noisy, Relevance
from vardrop.posteriors import AdditiveGaussian, Axes, Posterior
from vardrop.priors import LogUniform, Prior

_Map = Callable[..., Tensor]
Ties = dict[int, dict[str, Tensor]]  # noise tensors by name, by the id of their weight or bias
_LOG_UNIFORM = LogUniform()
_METHOD = ("posterior", "prior", "estimator", "gate", "noisy_bias")
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
    """A torch layer whose weights have a posterior, and whose input may pass a gate.

    Its arguments are those of the torch layer, `device` and `dtype` included, and then, by name,
    `posterior`, `prior`, `estimator`, `gate` and `noisy_bias`.
    """

    axes: ClassVar[Axes]
    spatial: ClassVar[int] = 0  # axes behind the one that runs over units
    weight: Tensor
    bias: Any  # torch declares it a Tensor, though it may be None
    posterior: Posterior | None
    prior: Prior | None
    estimator: Estimator
    gate: Gate | None
    _names: tuple[tuple[str, ...], ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        method = {name: kwargs.pop(name) for name in _METHOD if name in kwargs}
        super().__init__(*args, **kwargs)
        self.make_noisy(**method)

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
        tied: Ties | None = None,
    ) -> None:
        """Register the tensors of the method on a layer that is a plain torch layer so far.

        `tied` holds the noise tensors of other modules by the weight or bias that they belong to:
        a module with the same weight shares them, and adds its own for the next.
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
        self.noisy_bias = noisy_bias and self.bias is not None and posterior is not None
        for which, start in enumerate(self._starts()):
            mean, method = (self.weight, self.bias)[which // 2], (posterior, prior)[which % 2]
            there = {} if tied is None else tied.setdefault(id(mean), {})
            names[which] = self._own(start, bool(method and method.learned), there)
        self._names = tuple(names)
        self._centre()

    def _starts(self) -> list[dict[str, Tensor]]:
        """The initial tensors of posterior and prior, for the weight and for a noisy bias."""
        found: list[dict[str, Tensor]] = [{}, {}, {}, {}]
        if self.posterior is not None:
            found[0] = self.posterior.initial(self.weight, self.axes)
            found[1] = {} if self.prior is None else self.prior.initial(self.weight)
        if self.posterior is not None and self.noisy_bias:
            own = self.posterior.initial(self.bias, _BIAS_AXES)
            prior = {} if self.prior is None else self.prior.initial(self.bias)
            found[2:] = ({f"bias_{k}": v for k, v in t.items()} for t in (own, prior))
        return found

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start anew: the weights as torch starts them, and the noise as the method starts it."""
        super().reset_parameters()  # type: ignore[misc]
        if "_names" not in vars(self):
            return  # torch's own constructor calls this first
        for start in self._starts():
            for name, value in start.items():
                getattr(self, name).copy_(value)
        self._centre()
        if self.gate is not None:
            self.gate.reset_parameters()

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
        self, tensors: dict[str, Tensor], learned: bool, tied: dict[str, Tensor]
    ) -> tuple[str, ...]:
        for name, start in tensors.items():
            value = tied.setdefault(name, nn.Parameter(start) if learned else start)
            if value.shape != start.shape:
                raise VardropError(
                    f"Expected modules with one weight to share `{name}`, but its shape is "
                    f"{tuple(value.shape)} for one and {tuple(start.shape)} for another. "
                    "Use per='weight' or per='layer', or leave one out with `exclude`."
                )
            if learned:
                self.register_parameter(name, value)  # type: ignore[arg-type]
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
        if type(self.posterior) is not AdditiveGaussian or self.prior != _LOG_UNIFORM:
            return None
        return shared_weights(self.weight, self._tensors(0)["log_sigma2"])

    @property
    def op(self) -> _Map | None:
        """`op(x, weight, bias)` where the layer is one product of one input, else None."""
        return None

    def affine(self) -> Affine:
        """The product with its posterior, of a layer that has an `op`."""
        assert self.op is not None
        return self._map(self.op, None, None)

    def _affine(self, op: _Map, product: Product | None) -> Affine:
        return self._map(op, product, self._shared_weights())

    def _map(self, op: _Map, product: Product | None, shared: AdditiveWeights | None) -> Affine:
        assert self.posterior is not None
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
        if self.prior is not None:
            self.count_pass()
        return self.estimator(self._affine(op, product), inputs, noise)

    def kl(self, value: bool = True) -> Tensor | None:
        terms = self.kl_terms(value)
        return torch.stack(list(terms.values())).sum() if terms else None

    def kl_terms(self, value: bool = True, known: Container[Hashable] = ()) -> KLTerms:
        self.asked_for_kl()
        terms: KLTerms = {}
        if self.posterior is not None and self.prior is not None:
            if (key := self._key(0)) not in known:
                terms[key] = self._weight_kl(value)
            if self.noisy_bias and (key := self._key(2)) not in known:
                terms[key] = kl_divergence(
                    self.posterior, self.prior, self.bias, _BIAS_AXES,
                    self._tensors(2), self._tensors(3), value,
                )  # fmt: skip
        gate = self.gate
        extra = None if gate is None else gate.weight_kl(self.weight)
        return terms if extra is None else {**terms, ("gate", *self._key(0)[:1]): extra}

    def _weight_kl(self, value: bool) -> Tensor:
        assert self.posterior is not None
        assert self.prior is not None
        shared = self._shared_weights()
        return shared.kl(value) if shared is not None else kl_divergence(
            self.posterior, self.prior, self.weight, self.axes,
            self._tensors(0), self._tensors(1), value,
        )  # fmt: skip

    def _key(self, which: int) -> tuple[int, ...]:
        """What identifies the weight (0) or the bias (2) and its noise."""
        name = "bias" if which else "weight"
        # A weight that is computed anew at each access (a parametrization) belongs to one module.
        own = id(getattr(self, name)) if name in self._parameters else id(self)
        return own, *(id(t) for t in self._tensors(which).values())

    def kl_key(self) -> Hashable:
        if self.posterior is None:
            return id(self)
        return (self._key(0), self._key(2)) if self.noisy_bias else self._key(0)

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

    def owned_noise(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The weight, and a noisy bias, each with the tensors of its posterior and prior."""
        for mean, names in ((self.weight, self._names[:2]), (self.bias, self._names[2:])):
            if mean is not None:
                yield mean, {name: getattr(self, name) for group in names for name in group}

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
