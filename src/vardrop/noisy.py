"""What all noisy modules share: the sampling switch, their KL, and the walks over a net."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vardrop.errors import VardropError


class Noisy(nn.Module):
    """Base of layers, gates and heads that draw noise.

    `sampling` is None (noise while training), True or False; it never touches `training`.
    """

    sampling: bool | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether a forward pass draws noise now."""
        return self.training if self.sampling is None else self.sampling

    def kl(self) -> Tensor | None:
        """KL of this module's own noise, summed; None where its objective has no KL."""
        return None

    def kl_key(self) -> Hashable:
        """Modules with equal keys share their tensors, so their KL counts once."""
        return id(self)

    def log_alpha(self) -> Tensor | None:
        """log of noise variance over squared mean, or None where the method has no such ratio."""
        return None

    def noise_tensors(self) -> Iterator[Tensor]:
        """Parameters that describe noise or its prior, of this module alone."""
        yield from ()


def noisy_modules(net: nn.Module) -> dict[str, Noisy]:
    """The noisy modules of a net by name, each once; an error where there is none."""
    found = {name: m for name, m in net.named_modules() if isinstance(m, Noisy)}
    if not found:
        kinds = sorted({type(m).__name__ for m in net.modules()})
        raise VardropError(
            f"Expected `net` to have noisy modules, but got {', '.join(kinds)}. "
            "Call vardrop.convert(net, recipe) first."
        )
    return found


@contextmanager
def sampling(net: nn.Module, on: bool = True) -> Iterator[nn.Module]:
    """Switch the noise of a net on (or off) for a while; modes and BatchNorm stay as they are.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop()).eval()
    >>> with vd.sampling(net):
    ...     noisy = net(torch.ones(1, 2))
    >>> net.training, bool((noisy != net(torch.ones(1, 2))).all())
    (False, True)
    """
    modules = list(noisy_modules(net).values())
    before = [m.sampling for m in modules]
    # The fused encoder path reads weights without calling the layers, so it would skip the noise.
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        for m in modules:
            m.sampling = on
        torch.backends.mha.set_fastpath_enabled(fastpath and not on)
        yield net
    finally:
        for m, state in zip(modules, before, strict=True):
            m.sampling = state
        torch.backends.mha.set_fastpath_enabled(fastpath)


def kl(net: nn.Module) -> Tensor:
    """The KL of a net: the sum over its noisy modules, a shared module or tied weight once.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.ard())
    >>> vd.kl(net).shape
    torch.Size([])
    """
    modules = noisy_modules(net).values()
    terms = {m.kl_key(): term for m in modules if (term := m.kl()) is not None}
    if not terms:
        return next(iter(net.parameters())).new_zeros(())
    return torch.stack([t.to(torch.get_default_dtype()) for t in terms.values()]).sum()


def log_alpha(net: nn.Module) -> dict[str, Tensor]:
    """log alpha of every noisy module that has one, by module name, detached.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.sparse_vd())
    >>> {name: tuple(la.shape) for name, la in vd.log_alpha(net).items()}
    {'0': (2, 3)}
    """
    with torch.no_grad():
        found = {name: m.log_alpha() for name, m in noisy_modules(net).items()}
    return {name: la for name, la in found.items() if la is not None}
