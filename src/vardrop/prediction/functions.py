"""Whole functions: nets drawn from the posterior, with their weights and their masks fixed.

And nets with part of their noise: selective mean propagation samples the weights whose noise the
likelihood feels, those with a large |kappa| (`functional.curvature.kappa`), and takes the mean of
the others (Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks").
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import count, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from vardrop._core.calls import arguments, call, one_tensor, plain_batch, rows, untouched
from vardrop._core.checks import check_integer, check_net, check_number
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop.functional import GeneratorNoise, draw_from, generator, restore_state_on_error
from vardrop.functional.curvature import diagonal_fisher, kappa as kappa_of
from vardrop.gates import functional_dropout_rates
from vardrop.layers import Variational, plain_types
from vardrop.likelihoods import Likelihood, Objective, net_and_likelihood
from vardrop.noisy import named_modules_of, noisy_weights, tensor_name
from vardrop.posteriors import Axes, Posterior, Sharing, Tensors
from vardrop.prediction.preparation import (
    check_noise,
    guarded,
    is_random,
    measured,
    plain_forward,
    prepared,
    row_limit,
    whole_rows,
)

_SEEDS = 2**62
_BLOCK = 8  # draws that are reduced together
_DRAWS, _PROBES = 16, 4
_MASK = "sampled"
_POSITIONS = 64  # of a sequence, that are drawn together


def seed_of_a_call(seed: int | None) -> int:
    """The seed, or one from the global generator, which `torch.manual_seed` makes repeatable."""
    if seed is None:
        return int(torch.randint(_SEEDS, (), generator=generator(torch.device("cpu"))))
    check_integer("seed", seed, at_least=-(2**63))
    return seed


class HeldNoise(nn.Module):
    """A gate, head or dropout whose noise is drawn from the same seed for every row and call.

    So it is one function of a row, also where the noise depends on the input. The rows run along
    axis 0 of its only input. In a net that may be given a sequence in pieces, positions along axis
    1, `start` is the position of the first: a position has its noise in whatever piece it comes.
    `end` is the position after the last one where layers may be given the last ones alone.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.seed = module, 0
        self.start: int | None = None
        self.end: int | None = None
        self.side = getattr(module, "side", None)  # a layer asks its gate where it acts

    def forward(self, x: Tensor) -> Tensor:
        """The module's output for the held noise; an exported graph would draw it anew."""
        if torch.compiler.is_exporting():
            raise VardropError(
                "Expected a drawn function without held noise in a graph, but got that of "
                f"{type(self.module).__name__}, which a graph would draw anew. Freeze the net with "
                "vardrop.freeze and export that, or set the rate of its dropout to 0."
            )
        if self.start is None or x.dim() < 3:
            return self._drawn(x, self.seed)
        start = self.start if self.end is None else max(self.start, self.end - x.shape[1])
        block, before = divmod(start, _POSITIONS)
        pieces = _padded(x, before).split(_POSITIONS, 1)
        seeds = (self.seed if self._one_draw else self.seed ^ i for i in count(block))
        found = [self._drawn(piece, seed) for piece, seed in zip(pieces, seeds, strict=False)]
        return torch.cat(found, 1).narrow(1, before, x.shape[1])

    @property
    def _one_draw(self) -> bool:
        """Whether all positions share their noise."""
        noise = getattr(self.module, "noise", None)
        return getattr(noise, "granularity", None) == "example"

    @restore_state_on_error
    def _drawn(self, x: Tensor, seed: int) -> Tensor:
        with draw_from(GeneratorNoise(seed)), guarded(self.module):
            return torch.vmap(self._row, randomness="same")(x)

    def _row(self, row: Tensor) -> Tensor:
        return self.module(row.unsqueeze(0)).squeeze(0)

    def train(self, mode: bool = True) -> HeldNoise:
        """Set the mode of this module alone: what is held goes on drawing in every mode."""
        self.training = mode
        return self

    def redraw(self) -> None:
        """Take another seed from the current generator."""
        self.seed = seed_of_a_call(None)


def _padded(x: Tensor, before: int) -> Tensor:
    """x with zeros along axis 1: so many before, and as many after as make whole pieces."""
    after = -(before + x.shape[1]) % _POSITIONS
    return functional.pad(x, (0, 0) * (x.dim() - 2) + (before, after))


def _continued(net: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    past: Any = kwargs.get("past_key_values")
    start = int(past.get_seq_length()) if hasattr(past, "get_seq_length") else 0
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    length = next((t.shape[1] for t in given if isinstance(t, Tensor)), 0)
    _place(net, start, start + length if kwargs.get("logits_to_keep") else None)


def _ended(net: nn.Module, args: Any, output: Any) -> None:
    _place(net, 0, None)


def _place(net: nn.Module, start: int, end: int | None) -> None:
    for module in named_modules_of(net, HeldNoise).values():
        module.start, module.end = start, end


def follow_positions(net: nn.Module) -> None:
    """Let held noise go on where a cache of keys and values ends, in a net that takes one."""
    takes_cache = not isinstance(net, torch.jit.ScriptModule) and (
        "past_key_values" in signature(net.forward).parameters
    )
    if takes_cache:
        _place(net, 0, None)
        net.register_forward_pre_hook(_continued, with_kwargs=True)
        net.register_forward_hook(_ended, always_call=True)


class FunctionSampler:
    """A private net without noise of its own, whose weights and masks can be drawn again."""

    def __init__(self, net: nn.Module) -> None:
        check_noise(net)
        source = prepared(net, noise=True)
        self._drawn: dict[object, Callable[[], None]] = {}
        self._means: dict[int, nn.Parameter] = {}
        function = clone_modules(source)
        held: dict[nn.Module, HeldNoise] = {}
        inside: set[nn.Module] = set()  # of a module that is held as a whole
        for own, copied in zip(list(source.modules()), list(function.modules()), strict=True):
            if copied in inside:
                continue
            if isinstance(own, Variational):
                _check_held(own)
                self._fix_layer(own, cast(Variational, copied))
                inside.update(copied.get_submodule(name) for name in own.parts())
            elif is_random(own):
                held[copied] = _hold(copied)
                inside.update(copied.modules())
        self.net = clone_modules(function, held)
        # Convolutions are faster with the channels last, on CPU and GPU alike.
        self.channels_last = any(type(m) is nn.Conv2d for m in self.net.modules())
        self._held = list(held.values())
        follow_positions(self.net)

    def _fix_layer(self, source: Variational, layer: Variational) -> None:
        for part, own in source.parts().items():
            self._fix_layer(own, cast(Variational, layer.get_submodule(part)))
        gate, layer.gate = layer.gate, None
        layer.make_plain()
        names = (*layer.weight_axes, *layer.bias_names)
        held = {n: b for n, b in layer.named_buffers(recurse=False) if n in names}  # if frozen
        for name, mean in {**dict(layer.named_parameters(recurse=False)), **held}.items():
            setattr(layer, name, self._own(mean))
        plain = plain_types().get(type(layer))
        if gate is None and plain is not None:
            layer.__class__ = plain  # type: ignore[assignment]
        else:
            layer.add_noise()  # without noise of its own: it goes on applying its gate
            layer.gate = gate
        if source.posterior is not None:
            # Tied layers have the same key and share their weight, which is then drawn once.
            self._drawn.setdefault(source.kl_key(), _weight_drawer(source, layer))

    def _own(self, mean: Tensor) -> nn.Parameter:
        """A copy to draw into; the same one for tied parameters."""
        last = mean.dim() == 4
        kept = mean.detach().clone(
            memory_format=torch.channels_last if last else torch.preserve_format
        )
        return self._means.setdefault(id(mean), nn.Parameter(kept, requires_grad=False))

    def redraw(self) -> nn.Module:
        """Draw another function; the same object is returned every time."""
        with torch.no_grad():
            for fill in self._drawn.values():
                fill()
        for module in self._held:
            module.redraw()
        return self.net

    def __call__(self, x: Any) -> Tensor:
        """The present function's output."""
        if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return one_tensor(call(self.net, x))


def _weight_drawer(source: Variational, layer: Variational) -> Callable[[], None]:
    def fill() -> None:
        for name, tensor in source.noisy_tensors().items():
            getattr(layer, name).copy_(tensor.sample(tensor.draw()))

    return fill


def _hold(module: nn.Module) -> HeldNoise:
    _check_held(module)
    return HeldNoise(module)


def _check_held(module: nn.Module) -> None:
    if rates := functional_dropout_rates(module):
        raise VardropError(
            f"Expected noise that can be held fixed, but got dropout inside "
            f"{type(module).__name__}, which draws in every call anew. Set its "
            f"`{next(iter(rates))}` to 0."
        )


def _seeds(seed: int, count: int) -> list[int]:
    """A seed for every draw; the first ones are the same for every count."""
    found = torch.randint(_SEEDS, (count,), generator=torch.Generator().manual_seed(seed))
    return [int(s) for s in found]


class FunctionDraws:
    """Whole functions: draw k is one function of all rows, of every batch of the call."""

    def __init__(self, net: nn.Module, memory: int) -> None:
        self.sampler, self.memory, self.seed = FunctionSampler(net), memory, seed_of_a_call(None)
        _overwrite(self.sampler.net)

    def rows(self, x: Any) -> int:
        size = measured(self.sampler.net, x)
        return row_limit(self.sampler.net, size, x, self.memory)

    def __call__(self, x: Any, samples: int) -> Iterator[Tensor]:
        seeds = _seeds(self.seed, samples)
        for start in range(0, samples, _BLOCK):
            yield torch.stack([self._output(x, seed) for seed in seeds[start : start + _BLOCK]])

    def _output(self, x: Any, seed: int) -> Tensor:
        with draw_from(GeneratorNoise(seed)):
            self.sampler.redraw()
            with guarded(self.sampler.net):
                return self.sampler(untouched(x))


_FRESH = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _overwrite(net: nn.Module) -> None:
    """Let each ReLU work in place that stands in a row after a layer: its input is nobody's else.

    Fresh memory for the outputs of a convolution takes longer than the ReLU.
    """
    for row in whole_rows(net):
        for layer, after in pairwise(row):
            alone = plain_forward(layer) and plain_forward(after)
            if alone and type(layer) in _FRESH and type(after) is nn.ReLU:
                after.inplace = True


def draws(net: nn.Module, n: int, seed: int | None = None) -> Iterator[nn.Module]:
    """Draw n functions from the posterior of a net, one by one, each a net of its own.

    Args:
        net: a net with noisy modules or dropout.
        n: how many functions.
        seed: makes the sequence repeatable; the global generator is then left alone.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import draws
    >>> net = vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop())
    >>> [tuple(f(torch.ones(4, 2)).shape) for f in draws(net, 2)]
    [(4, 1), (4, 1)]
    """
    check_net(net)
    check_integer("n", n)
    return _draws(net, n, seed_of_a_call(seed))


def _draws(net: nn.Module, n: int, seed: int) -> Iterator[nn.Module]:
    sampler = FunctionSampler(net)
    for own in _seeds(seed, n):
        yield _next(sampler, own)


@restore_state_on_error
def _next(sampler: FunctionSampler, seed: int) -> nn.Module:
    with draw_from(GeneratorNoise(seed)):
        sampler.redraw()
    return copy.deepcopy(sampler.net).eval().requires_grad_(False)


@restore_state_on_error
def draw(net: nn.Module, seed: int | None = None) -> nn.Module:
    """Draw one function from the posterior of a net: a net of plain layers with frozen weights.

    The output of a row is the same in every batch. Gates and dropout hold one mask for all rows. A
    model of language that takes `past_key_values` is one function of a sequence, with the cache and
    without: `draw(model).generate(...)` samples text from one function.

    Args:
        net: a net with noisy modules or dropout; it stays as it is.
        seed: makes the draw repeatable; the global generator is then left alone.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import draw
    >>> f = draw(vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop()), seed=0)
    >>> type(f), bool((f(torch.ones(1, 2)) == f(torch.ones(1, 2))).all())
    (<class 'torch.nn.modules.linear.Linear'>, True)
    """
    return next(draws(net, 1, seed))


@dataclass(frozen=True)
class SelectedNoise(Posterior):
    """Another posterior, with its noise only where the tensor `sampled` is one."""

    whole: Posterior

    @property
    def gaussian(self) -> bool:
        return self.whole.gaussian

    @property
    def noise_per(self) -> Sharing | None:
        return self.whole.noise_per

    @property
    def symmetric(self) -> bool:
        return self.whole.symmetric

    @property
    def zero_mean(self) -> bool:
        return self.whole.zero_mean

    @property
    def learned(self) -> bool:
        return self.whole.learned

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {**self.whole.initial(weight, axes), _MASK: torch.ones_like(weight)}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.whole.variance(weight, tensors) * tensors.get(_MASK, 1)

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        return self.whole.draw(weight, axes, batch)

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return self.whole.perturbation(weight, noise, tensors) * tensors.get(_MASK, 1)

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.whole.log_alpha(weight, tensors)


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
    >>> from vardrop.prediction import predict, select, unlabelled_kappa
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> x = torch.randn(5, 4)
    >>> some = select(net, unlabelled_kappa(net, x), threshold=1e-3)
    >>> predict(some.net, x, samples=8)
    Prediction(5 rows, Categorical, 8 draws)

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
        layer.replace_posterior(SelectedNoise(layer.posterior), noise)
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
    model, meaning = net_and_likelihood(net, likelihood)
    quiet = prepared(model, noise=False)
    _layers(quiet)
    owner = _owners(quiet)
    weights = {name: (key, t) for name, key, t in noisy_weights(quiet) if owner[name] == name}
    keys, tensors = [key for key, _ in weights.values()], [t for _, t in weights.values()]

    def curvature(leaves: Sequence[Tensor]) -> list[Tensor]:
        given = untouched(plain_batch(x))
        args, kwargs = arguments(quiet, given)
        output = one_tensor(
            functional_call(quiet, dict(zip(keys, leaves, strict=True)), args, kwargs)
        )
        score = _score(output.detach(), meaning, counted)
        return [-f / rows(x) for f in diagonal_fisher(output, leaves, score, _PROBES)]

    with torch.enable_grad(), draw_from(GeneratorNoise(seed_of_a_call(seed))):
        variances = [t.variance().detach().expand_as(t.mean) for t in tensors]

        def draw() -> list[Tensor]:
            return [t.sample(t.draw()).detach() for t in tensors]

        values = kappa_of(variances, draw, curvature, _DRAWS)
    return dict(zip(weights, values, strict=True))


def _score(output: Tensor, likelihood: Likelihood, counted: Tensor | None) -> Callable[[], Tensor]:
    """Draws d log p(y | output) / d output for y from the model."""

    def score() -> Tensor:
        leaf = output.clone().requires_grad_()
        density = likelihood.log_density(leaf.unsqueeze(0), likelihood.sample(output))
        density = density if counted is None else density.where(counted, 0)
        return torch.autograd.grad(density.sum(), leaf)[0]

    return score
