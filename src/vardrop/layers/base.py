"""The base of layers with noisy weights: tensors, products, the KL.

A noisy layer is a subclass of the torch layer of its name. A weight is the posterior mean, and the
noise tensors are stored next to it, so a plain checkpoint loads, and with sampling off the outputs
are those of the torch layer. The noise of `weight` is stored under the names of the posterior
(`log_sigma2`), the noise of any other tensor with a prefix (`bias_log_sigma2`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_type
from vardrop._core.errors import VardropError
from vardrop._core.kl_warning import count_pass
from vardrop._core.torch_private import own_parameters
from vardrop.estimators import (
    AffineMap,
    Estimator,
    ExplicitNoise,
    check_method,
    local_reparameterization,
)
from vardrop.functional import to_float32_or_wider
from vardrop.gates import FeatureNoise, Gate, Side, per_unit
from vardrop.noisy import KLTerms, Noisy, NoisyTensor
from vardrop.posteriors import Axes, Posterior, Tensors
from vardrop.priors import Prior

Ties = dict[int, dict[str, Tensor]]  # noise tensors by name, by the id of their mean
Op = Callable[..., Tensor]  # of inputs, weight and bias
_METHOD = ("posterior", "prior", "estimator", "gate", "noisy_bias")


class _Stored(NamedTuple):  # the attributes with the tensors of posterior and prior, by tensor name
    noise: dict[str, str]
    hyper: dict[str, str]
    axes: Axes


class Variational(Noisy):
    """A torch layer whose weights have a posterior, and whose input may pass a gate.

    A custom layer derives from this class and the torch layer. It declares its weights (`axes`, or
    `weights_of` for several) and its units (`sizes`, or `num_inputs` and `num_outputs`), and calls
    `product` in its forward. `vardrop.register_layer` makes it available to `convert`.

    Args:
        *args: the arguments of the torch layer.
        **kwargs: its keyword arguments, and the arguments of `add_noise`: `posterior`, `prior`,
            `estimator`, `gate` and `noisy_bias`.
    """

    axes: ClassVar[Axes]
    sizes: ClassVar[tuple[str, str]]  # attributes with the numbers of input and output units
    spatial: ClassVar[int] = 0  # axes after the one that runs over units
    bias_names: tuple[str, ...] = ("bias",)  # one number per output, noisy only with `noisy_bias`
    weight: Tensor  # of a layer with one weight
    bias: Any  # torch declares it a Tensor, though it may be None
    posterior: Posterior | None
    prior: Prior | None
    estimator: Estimator
    gate: Gate | None
    noisy_bias: bool
    _noise: dict[str, _Stored]  # by noisy tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        method = {name: kwargs.pop(name) for name in _METHOD if name in kwargs}
        super().__init__(*args, **kwargs)
        self.add_noise(**method)

    @property
    def num_inputs(self) -> int:
        """The number of input units that a gate would act on."""
        return int(getattr(self, self.sizes[0]))

    @property
    def num_outputs(self) -> int:
        """The number of output units."""
        return int(getattr(self, self.sizes[1]))

    @classmethod
    def weights_of(cls, layer: nn.Module) -> Mapping[str, Axes]:
        """The weights of a noisy or plain layer by name, each with its axes.

        Args:
            layer: a noisy or plain layer of this type.

        Returns:
            The axes of each weight by its name.
        """
        return {"weight": cls.axes}

    @classmethod
    def unsupported_reason(cls, layer: nn.Module, gate: FeatureNoise | None) -> str:
        """Why a plain layer cannot be made noisy, or not with this gate. Empty if it can.

        Args:
            layer: a plain layer.
            gate: the noise of the gate, or None.

        Returns:
            The reason.
        """
        if getattr(gate, "granularity", None) == "sequence":
            return "one mask per sequence is for recurrent layers"
        return ""

    @property
    def weight_axes(self) -> Mapping[str, Axes]:
        """The weights by name, each with its axes."""
        return self.weights_of(self)

    def _biases(self) -> dict[str, Tensor]:
        return {n: b for n in self.bias_names if (b := getattr(self, n, None)) is not None}

    def add_noise(
        self,
        posterior: Posterior | None = None,
        prior: Prior | None = None,
        estimator: Estimator = local_reparameterization,
        gate: FeatureNoise | None = None,
        noisy_bias: bool = False,
        tied: Ties | None = None,
    ) -> None:
        """Register the tensors of the method on a plain torch layer.

        Args:
            posterior: of the weights, or None.
            prior: of the weights, or None.
            estimator: how the noise of the weights is drawn.
            gate: noise on the inputs or outputs, or None.
            noisy_bias: whether the biases have the posterior and the prior too.
            tied: noise tensors of other modules by the id of their weight. A module with the same
                weight shares them, and new tensors are added.
        """
        check_method(posterior, prior, estimator)
        check_type("gate", gate, FeatureNoise | None, "a FeatureNoise such as BinaryDropout()")
        if reason := self.unsupported_reason(self, gate):
            raise VardropError(f"A noisy {type(self).__name__} does not support this: {reason}.")
        self.posterior, self.prior, self.estimator = posterior, prior, estimator
        self.noisy_bias = noisy_bias and bool(self._biases()) and posterior is not None
        self.gate, self._noise = None, {}
        if gate is not None:
            first = getattr(self, next(iter(self.weight_axes)))
            self.gate = self.new_gate(gate).to(to_float32_or_wider(first)).train(self.training)
        noisy = {} if posterior is None else dict(self.weight_axes)
        if self.noisy_bias:
            noisy |= dict.fromkeys(self._biases(), Axes(input=(), output=(0,)))
        for name, axes in noisy.items():
            mean = getattr(self, name)
            shared = {} if tied is None else tied.setdefault(id(mean), {})
            noise, hyper = (self._store(name, t, shared) for t in self._start(mean, axes))
            self._noise[name] = _Stored(noise, hyper, axes)
        self._centre()

    def new_gate(self, noise: FeatureNoise) -> Gate:
        """Make a gate for the units of this layer.

        Args:
            noise: the method of the gate.

        Returns:
            The gate.
        """
        side = noise.sides[self.spatial > 0]
        units = self.num_inputs if side == "input" else self.num_outputs
        return Gate(noise, units, -1 - self.spatial, side)

    def gated_weights(self) -> dict[str, Tensor]:
        """The weights that multiply gated units, by name."""
        return {name: getattr(self, name) for name in self.weight_axes}

    def check_gate_folds(self, owners: Mapping[int, int]) -> None:
        """Raise an error if the gate is on a tied weight, so that it cannot be folded into it.

        Args:
            owners: how many modules own each parameter, by its id.
        """
        weights = () if self.gate is None else self.gated_weights().values()
        if any(owners[id(weight)] > 1 for weight in weights):
            raise VardropError(
                "Expected every gated layer to have weights of its own, but got tied weights, "
                "into which the mean of one gate cannot be folded. Leave the layer out with "
                "`exclude` when you convert, or untie them first."
            )

    def per_feature(self, factor: Tensor, name: str) -> Tensor:
        """Map one number per unit of the gate to one per input or output of a gated weight.

        Args:
            factor: one number per unit of the gate.
            name: of the weight.

        Returns:
            One number per input or output of the weight.
        """
        return factor

    def sublayers(self) -> dict[str, Variational]:
        """Layers inside this one that share its method, by name."""
        return {}

    def _start(self, mean: Tensor, axes: Axes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The initial tensors of posterior and prior. Tensors that are learned are parameters."""
        assert self.posterior is not None
        noise = self.posterior.initial(mean, axes)
        hyper = {} if self.prior is None else self.prior.initial(mean)
        if self.posterior.learned:
            noise = {name: nn.Parameter(tensor) for name, tensor in noise.items()}
        if self.prior is not None and self.prior.learned:
            hyper = {name: nn.Parameter(tensor) for name, tensor in hyper.items()}
        return noise, hyper

    def _store(self, mean: str, tensors: Tensors, shared: dict[str, Tensor]) -> dict[str, str]:
        """Register the tensors of a mean, or the ones that a module with the same mean has."""
        names = {}
        for name, new in tensors.items():
            tensor = shared.setdefault(name, new)
            if tensor.shape != new.shape:
                raise VardropError(
                    f"Expected modules with one weight to share `{name}`, but its shape is "
                    f"{tuple(tensor.shape)} for one and {tuple(new.shape)} for another. "
                    "Use per='weight' or per='layer', or leave one out with `exclude`."
                )
            names[name] = name if mean == "weight" else f"{mean}_{name}"
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(names[name], tensor)
            else:
                self.register_buffer(names[name], tensor)
        return names

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the weights as torch does, and the noise as the method does."""
        self._reset_means()
        if "_noise" not in vars(self):
            return  # torch's own constructor calls this first
        for tensor in self.noisy_tensors().values():
            noise, hyper = self._start(tensor.mean, tensor.axes)
            current = {**tensor.noise, **tensor.hyper}
            for name, start in (noise | hyper).items():
                current[name].copy_(start)
        self._centre()
        if self.gate is not None:
            self.gate.reset_parameters()

    def _reset_means(self) -> None:
        super().reset_parameters()  # type: ignore[misc]

    def _centre(self, fixed: bool = True) -> None:
        """Keep the means of a zero-mean posterior at zero, also after loading, or free them."""
        if self.posterior is not None and self.posterior.zero_mean:
            with torch.no_grad():
                for mean in (getattr(self, name) for name in self._noise):
                    (mean.zero_() if fixed else mean).requires_grad_(not fixed)

    def replace_posterior(self, posterior: Posterior, noise: Mapping[str, Tensors]) -> None:
        """Replace the posterior of the same tensors. Prior, gate and switches are unchanged.

        Args:
            posterior: the new posterior.
            noise: its tensors by the name of their mean. A parameter stays a parameter, and other
                tensors become buffers. Pass the same objects to tied layers.
        """
        self._centre(fixed=False)
        for stored in self._noise.values():
            for attribute in stored.noise.values():
                delattr(self, attribute)
        names = {name: self._store(name, noise[name], {}) for name in self._noise}
        # A new dictionary, because clones share the old one.
        self._noise = {n: s._replace(noise=names[n]) for n, s in self._noise.items()}
        self.posterior = posterior
        self._centre()

    def make_plain(self) -> None:
        """Remove every noise tensor. The mean of the gate is folded into the means."""
        if self.gate is not None and (mean := self.gate.unit_mean()) is not None:
            self.scale_units(mean, self.gate.side)
        self._centre(fixed=False)
        for attribute in (*self.noise_names(), *_METHOD, "_noise"):
            delattr(self, attribute)
        self.__dict__.pop("sampling", None)

    @torch.no_grad()
    def scale_units(self, factor: Tensor, side: Side) -> None:
        """Multiply every input or output unit by one number, in place, in the weights.

        Override it if the output is not linear in all of the weights.

        Args:
            factor: one number per unit.
            side: "input" or "output".
        """
        for name, weight in self.gated_weights().items():
            entries = self.per_feature(factor, name)
            axes = self.weight_axes.get(name) or self.axes  # of a weight in a sublayer
            weight.mul_(per_unit(entries, weight, side, axes))
        if side == "output":
            for bias in self._biases().values():
                bias.mul_(factor)

    def noisy_tensors(self) -> dict[str, NoisyTensor]:
        """The current noisy tensors by name: `weight`, and `bias` if it is noisy."""
        return {name: self._view(name) for name in self._noise}

    def _view(self, name: str) -> NoisyTensor:
        assert self.posterior is not None
        noises, hypers, axes = self._noise[name]
        noise = {key: getattr(self, attribute) for key, attribute in noises.items()}
        hyper = {key: getattr(self, attribute) for key, attribute in hypers.items()}
        return NoisyTensor(getattr(self, name), self.posterior, self.prior, noise, hyper, axes)

    @property
    def op(self) -> Op | None:
        """`op(x, weight, bias)` if the layer is one product of one input, else None."""
        return None

    def affine(self, op: Op | None = None, weight: str = "weight", bias: str = "bias") -> AffineMap:
        """A product with the distribution of its weight and bias.

        Args:
            op: the product as a function of inputs, weight and bias. By default `self.op`.
            weight: the name of the weight.
            bias: the name of the bias.

        Returns:
            The product with its noise.
        """
        return AffineMap(
            op=op or self.op,  # type: ignore[arg-type]
            weight=self._view(weight).with_shared_variance(self.training),
            bias=self._view(bias) if bias in self._noise else getattr(self, bias, None),
            outputs=self.num_outputs,
            trailing=self.spatial,
        )

    def apply_gate(self, side: Side, x: Tensor) -> Tensor:
        """Apply the gate to x if it acts on this side of the layer.

        Args:
            side: "input" or "output".
            x: the inputs or outputs of the layer.

        Returns:
            x, with the gate applied if it acts on this side.
        """
        return self.gate(x) if self.gate is not None and self.gate.side == side else x

    def product(
        self,
        op: Op,
        inputs: tuple[Tensor, ...],
        noise: ExplicitNoise | None = None,
        weight: str = "weight",
        bias: str = "bias",
    ) -> Tensor:
        """Compute `op(*inputs, weight, bias)`, with a draw while sampling or for given noise.

        Args:
            op: linear in each input and in the weight. The bias may be None.
            inputs: with examples along axis 0.
            noise: for the estimator. None draws it.
            weight: the name of the weight.
            bias: the name of the bias. A layer without such an attribute has no bias.

        Returns:
            The output of the estimator, or of `op` for the means.
        """
        if self.posterior is None or not (self.is_sampling or noise is not None):
            return op(*inputs, getattr(self, weight), getattr(self, bias, None))
        if self.prior is not None:
            count_pass(self)
        return self.estimator(self.affine(op, weight, bias), inputs, noise)

    def product_with_gate(self, op: Op, x: Tensor, noise: ExplicitNoise | None) -> Tensor:
        """Apply `product` to one input, with the gate before or after it.

        Args:
            op: the product as a function of inputs, weight and bias.
            x: the input, which may be a single example without a batch axis.
            noise: explicit noise, or None.

        Returns:
            The output of the layer.
        """
        x, single = self.apply_gate("input", x), x.dim() == self.spatial + 1
        y = self.product(op, (x.unsqueeze(0) if single else x,), noise)
        return self.apply_gate("output", y.squeeze(0) if single else y)

    def kl(self, value: bool = True) -> Tensor | None:
        """KL of the noisy tensors and of the gate, summed, or None if there is none."""
        terms = self.kl_terms(value)
        return torch.stack(list(terms.values())).sum() if terms else None

    def kl_terms(self, value: bool = True, counted: Container[Hashable] = ()) -> KLTerms:
        """The terms of the KL by a key of their tensors, including the gate and inner layers."""
        if not torch.compiler.is_compiling():
            vars(self)["passes_without_kl"] = 0  # the KL is used
        terms: KLTerms = {}
        for name in self._noise if self.prior is not None else ():
            tensor = self._view(name)
            key = self._key(name, tensor)
            if key not in counted and (term := tensor.kl(value)) is not None:
                terms[key] = term
        if self.gate is not None:
            for name, weight in self.gated_weights().items():
                extra = self.gate.weight_kl(weight, partial(self.per_feature, name=name))
                if extra is not None:
                    terms["gate", self._key(name)] = extra
            units = self.gate.kl_terms(value, counted)
            if self.gate.noise.counts_weights:
                units = {key: torch.zeros_like(term) for key, term in units.items()}
            terms |= units
        return terms

    def _key(self, name: str, tensor: NoisyTensor | None = None) -> tuple[int, ...]:
        """A key of a weight and its noise. A weight that is computed belongs to one layer."""
        owner, _, attribute = name.rpartition(".")
        weight = own_parameters(self.get_submodule(owner)).get(attribute)
        noise = () if tensor is None else map(id, tensor.noise.values())
        return id(self if weight is None else weight), *noise

    def kl_key(self) -> Hashable:
        return tuple(self._key(n, t) for n, t in self.noisy_tensors().items()) or id(self)

    def variance(self) -> Tensor:
        """Var w of a layer with one weight, in the shape of `weight`."""
        name = next(iter(self.weight_axes))
        if self.posterior is None:
            return torch.zeros_like(getattr(self, name))
        return self._view(name).variance().expand_as(getattr(self, name))

    def noise_names(self) -> Iterable[str]:
        return [n for s in self._noise.values() for n in (*s.noise.values(), *s.hyper.values())]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._centre()  # a plain checkpoint holds means, but a zero-mean layer has none

    def extra_repr(self) -> str:
        parts = (f"{name}={getattr(self, name)!r}" for name in ("posterior", "prior", "estimator"))
        return ", ".join([super().extra_repr(), *parts])
