"""Function draws: one net from the posterior, with its weights and its masks fixed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from vardrop.errors import VardropError
from vardrop.layers import NOISY_TYPES, Variational
from vardrop.noisy import Noisy
from vardrop.posteriors import Axes
from vardrop.prediction.modes import check_noise, drops, prepared, seeded

_PLAIN = {noisy: plain for plain, noisy in NOISY_TYPES.items()}
_BIAS_AXES = Axes(input=(), output=(0,))
_SEEDS = 2**62


class HeldNoise(nn.Module):
    """A gate, head or dropout whose noise is drawn from the same seed for every row and call.

    So it is one function of a row, also where the noise depends on the input. The rows run along
    axis 0 of its only input.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.seed = module, 0
        self.side = getattr(module, "side", None)  # a layer asks its gate where it acts

    def forward(self, x: Tensor) -> Tensor:
        """The module's output for the held noise."""
        with seeded(self.seed), prepared(self.module, noise=True):
            return torch.vmap(self._row, randomness="same")(x)

    def _row(self, row: Tensor) -> Tensor:
        return self.module(row.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]

    def redraw(self) -> None:
        """Take another seed from the current generator."""
        self.seed = int(torch.randint(_SEEDS, ()))


class FunctionSampler:
    """A copy of a net without noise of its own, whose weights and masks can be drawn again."""

    def __init__(self, net: nn.Module) -> None:
        check_noise(net)
        self._sources: dict[object, Callable[[], None]] = {}
        held: dict[nn.Module, HeldNoise] = {}
        function = copy.deepcopy(net)
        inside: set[nn.Module] = set()  # of a module that is held as a whole
        for original, copied in zip(list(net.modules()), list(function.modules()), strict=True):
            if copied in inside:
                continue
            if isinstance(original, Variational):
                self._fix_layer(original, cast(Variational, copied))
            elif isinstance(copied, Noisy) or drops(copied):
                held[copied] = _hold(copied)
                inside.update(copied.modules())
        self.net = _replace(function, held).eval().requires_grad_(False)
        # Convolutions are faster with the channels last, on CPU and GPU alike.
        self.channels_last = any(type(m) is nn.Conv2d for m in self.net.modules())
        if self.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._held = [m for m in self.net.modules() if isinstance(m, HeldNoise)]

    def _fix_layer(self, source: Variational, layer: Variational) -> None:
        gate, layer.gate = layer.gate, None
        layer.make_plain()
        if gate is None and type(layer) in _PLAIN:
            layer.__class__ = _PLAIN[type(layer)]  # type: ignore[assignment]
        else:
            layer.make_noisy()  # without noise of its own: it goes on applying its gate
            layer.gate = gate
        if source.posterior is not None:
            # Tied layers have the same key and share their weight, which is then drawn once.
            self._sources.setdefault(source.kl_key(), _weight_drawer(source, layer))

    def redraw(self) -> nn.Module:
        """Draw another function; the same object is returned every time."""
        with torch.no_grad():
            for source in self._sources.values():
                source()
        for module in self._held:
            module.redraw()
        return self.net

    def __call__(self, x: Tensor) -> Tensor:
        """The present function's output."""
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.net(x)  # type: ignore[no-any-return]


def _weight_drawer(source: Variational, layer: Variational) -> Callable[[], None]:
    posterior = source.posterior
    assert posterior is not None

    def fill() -> None:
        noise = posterior.draw(source.weight, source.axes)
        layer.weight.copy_(posterior.sample(source.weight, noise, source._tensors(0)))
        if source.noisy_bias and source.bias is not None and layer.bias is not None:
            noise = posterior.draw(source.bias, _BIAS_AXES)
            layer.bias.copy_(posterior.sample(source.bias, noise, source._tensors(2)))

    return fill


def _hold(module: nn.Module) -> HeldNoise:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        raise VardropError(
            f"Expected noise that can be held fixed, but got dropout inside "
            f"{type(module).__name__}, which runs in one torch function. Set its dropout to 0."
        )
    return HeldNoise(module)


def _replace(root: nn.Module, held: dict[nn.Module, HeldNoise]) -> nn.Module:
    """Put the holders in the place of what they hold, wherever it is registered."""
    if root in held:
        return held[root]
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child in held and not isinstance(parent, HeldNoise):
                parent._modules[name] = held[child]
    return root


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
    if n < 1:
        raise VardropError(f"Expected `n` to be at least 1, but got {n}.")
    return _draws(net, n, seed)


def _draws(net: nn.Module, n: int, seed: int | None) -> Iterator[nn.Module]:
    sampler, offset = FunctionSampler(net), 0
    for offset in range(n):
        with seeded(None if seed is None else _mixed(seed, offset)):
            sampler.redraw()
        yield copy.deepcopy(sampler.net)


def _mixed(seed: int, offset: int) -> int:
    """Another seed for every draw, so that the generator is forked only while one is drawn."""
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(_SEEDS, (offset + 1,), generator=generator)[offset])


def draw(net: nn.Module, seed: int | None = None) -> nn.Module:
    """Draw one function from the posterior of a net: a net of plain layers with frozen weights.

    The output of a row is the same in every batch. Gates and dropout hold one mask for all rows.

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
