"""What all noisy modules share: the sampling switch, their KL, and the walks over a net."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vardrop.checks import check_net, check_type
from vardrop.errors import VardropError

Kind = Literal["weight", "input", "output"]


@dataclass(frozen=True, eq=False)
class Relevance:
    """How much each weight (or unit) matters to a module, and the method's rule to keep it.

    `score` has the shape of the weight, or one entry an input or output unit, as `kind` says.
    """

    score: Tensor
    threshold: float
    keep_above: bool
    kind: Kind

    @property
    def kept(self) -> Tensor:
        """True where the rule keeps the weight or unit."""
        above, below = self.score > self.threshold, self.score < self.threshold
        return above if self.keep_above else below


class Noisy(nn.Module):
    """Base of layers, gates and heads that draw noise.

    `sampling` is None (noise while training), True or False; it never touches `training`.
    """

    sampling: bool | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether a forward pass draws noise now."""
        return self.training if self.sampling is None else self.sampling

    def kl(self, value: bool = True) -> Tensor | None:
        """KL of this module's own noise, summed; None where its objective has no KL.

        With `value=False` only the gradient of the result counts.
        """
        return None

    def kl_key(self) -> Hashable:
        """Modules with equal keys share their tensors, so their KL counts once."""
        return id(self)

    def get_log_alpha(self) -> Tensor | None:
        """log of noise variance over squared mean, or None where the method has no such ratio."""
        return None

    def relevance(self) -> Relevance | None:
        """What the method's own rule keeps, or None where it selects nothing."""
        return None

    def noise_tensors(self) -> Iterator[Tensor]:
        """Parameters that describe noise or its prior, of this module alone."""
        yield from ()


def noisy_modules(net: nn.Module) -> dict[str, Noisy]:
    """The noisy modules of a net by name, each once; an error where there is none."""
    check_net(net)
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
    check_type("on", on, bool, "True or False")
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


def untouched(x: Any) -> Any:
    """An input with copies of its tensors, in any structure of tuples, lists and dictionaries.

    A net that begins in place (`Dropout(inplace=True)`, `x += 1`) then leaves the caller's alone,
    and every draw begins with the same.
    """
    return x.clone() if isinstance(x, Tensor) else tree_map_only(Tensor, Tensor.clone, x)


def kl(net: nn.Module, value: bool = True) -> Tensor:
    """The KL of a net: the sum over its noisy modules, a shared module or tied weight once.

    With `value=False` the gradient is exact and the value unspecified, which is faster.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.ard())
    >>> vd.kl(net).shape
    torch.Size([])
    """
    unique = {m.kl_key(): m for m in noisy_modules(net).values()}
    terms = [term for term in [m.kl(value) for m in unique.values()] if term is not None]
    if not terms:
        return torch.zeros((), device=next(net.parameters()).device)
    return torch.stack(terms).sum()


def log_alpha(net: nn.Module) -> dict[str, Tensor]:
    """log alpha of every noisy module that has one, by module name, detached.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.sparse_vd())
    >>> {name: tuple(la.shape) for name, la in vd.log_alpha(net).items()}
    {'0': (2, 3)}
    """
    with torch.no_grad():
        found = {name: m.get_log_alpha() for name, m in noisy_modules(net).items()}
    return {name: la for name, la in found.items() if la is not None}


def relevance(net: nn.Module) -> dict[str, Relevance]:
    """What each method keeps, by the name of its module, detached.

    Weight posteriors: log alpha, one a weight, kept below 3. Gates: the method's own score, one a
    unit; a gate inside a layer is named `<layer>.gate`, and `kind` says whether its units are the
    layer's inputs or its outputs.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.sparse_vd(log_sigma2=-30.0))
    >>> {name: (r.kind, int(r.kept.sum())) for name, r in vd.relevance(net).items()}
    {'0': ('weight', 6)}
    """
    with torch.no_grad():
        found = {name: m.relevance() for name, m in noisy_modules(net).items()}
    return {name: r for name, r in found.items() if r is not None}
