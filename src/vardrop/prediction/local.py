"""Local noise under vmap: all draws of a chunk at once, what precedes the first noise shared."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from vardrop.estimators import Affine, Estimator, LocalReparameterization
from vardrop.functional import normal_like
from vardrop.layers import Variational
from vardrop.prediction.modes import prepared


class _LocalDraw:
    """`LocalReparameterization` without what only its gradient needs.

    For the first noisy layer of a net the mean and the deviation are the same for every draw, so
    `remembers` lets all chunks share them.
    """

    def __init__(self, floor: float, remembers: bool) -> None:
        self.floor, self.remembers = floor, remembers
        self.memory: tuple[Tensor | None, Tensor] | None = None

    def __call__(self, affine: Affine, inputs: tuple[Tensor, ...], noise: Any = None) -> Tensor:
        mean, std = self.memory or self._moments(affine, inputs)
        y = normal_like(std).mul_(std)
        return (y if mean is None else y.add_(mean)).to(affine.precision)

    def _moments(self, affine: Affine, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor]:
        found = affine.mean_output(inputs), affine.variance_output(inputs, self.floor).sqrt_()
        if self.remembers:
            self.memory = found
        return found


@contextmanager
def _drawing(net: nn.Module, first: nn.Module | None) -> Iterator[None]:
    """Give the layers with local reparameterisation the form for prediction, for a while."""
    layers = [m for m in net.modules() if isinstance(m, Variational)]
    before = [(m, m.estimator) for m in layers if type(m.estimator) is LocalReparameterization]
    try:
        for layer, own in before:
            assert isinstance(own, LocalReparameterization)
            layer.estimator = cast(Estimator, _LocalDraw(own.floor, layer is first))
        yield
    finally:
        for layer, own in before:
            layer.estimator = own


def local_draws(
    net: nn.Module, x: Tensor, sizes: list[int], first: nn.Module | None
) -> Generator[Tensor, None, None]:
    """Outputs (s, N, ...) for every size s, with fresh noise for every example and draw.

    `first` is the noisy layer whose input is the same for all draws, if it is called once.
    """
    with prepared(net, noise=True), _drawing(net, first):
        run, block = _vectorised, None
        try:
            block = _vectorised(net, x, sizes[0])
        except Exception as error:
            run, block = _looped, _looped(net, x, sizes[0])  # raises if the net is at fault
            warnings.warn(
                f"Predicting by a slower loop: {_failing_module(net, x)} cannot run under vmap "
                f"({_first_line(error)})",
                stacklevel=2,
            )
        yield block
        for size in sizes[1:]:
            yield run(net, x, size)


def _vectorised(net: nn.Module, x: Tensor, draws: int) -> Tensor:
    index = torch.arange(draws, device=x.device)
    return torch.vmap(lambda _: net(x), randomness="different")(index)  # type: ignore[no-any-return]


def _looped(net: nn.Module, x: Tensor, draws: int) -> Tensor:
    return torch.stack([net(x) for _ in range(draws)])


def _failing_module(net: nn.Module, x: Tensor) -> str:
    """The innermost module that was entered and not left when vmap failed."""
    entered: list[tuple[str, nn.Module]] = []
    with ExitStack() as hooks:
        for name, module in net.named_modules():
            entry = (name, module)
            hooks.callback(
                module.register_forward_pre_hook(lambda *_, e=entry: entered.append(e)).remove
            )
            hooks.callback(module.register_forward_hook(lambda *_: entered.pop() and None).remove)
        try:
            _vectorised(net, x, 2)
        except Exception:
            name, module = entered[-1] if entered else ("", net)
            return f"module '{name or '(net)'}' ({type(module).__name__})"
    return "the net"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
