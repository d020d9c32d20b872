"""What all noisy modules share: the sampling switch, their KL, and the walks over a net."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vardrop.checks import check_net, check_type
from vardrop.errors import VardropError

Kind = Literal["weight", "input", "output"]
KLTerms = dict[Hashable, Tensor]

# A layer that was passed through so often while its parameters changed is being trained; steps
# that gather gradients, or draws of one step, change no parameters in between.
_PASSES = 100
_NO_KL = (
    f"A noisy net is being trained, but nobody asked for its KL in {_PASSES} passes: nothing then "
    "keeps the noise from vanishing. Minimise vardrop.ELBO(net, likelihood, num_data)(x, y).loss, "
    "or add vardrop.kl(net) / num_data to the loss. ELBO(..., beta=0) trains without it."
)


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
    _passes: float = 0  # noisy passes with gradients since the KL was last asked for
    _updates: int = 0  # of the parameters, at the first of these passes

    @property
    def is_sampling(self) -> bool:
        """Whether a forward pass draws noise now."""
        return self.training if self.sampling is None else self.sampling

    def kl(self, value: bool = True) -> Tensor | None:
        """KL of this module's own noise, summed; None where its objective has no KL.

        With `value=False` only the gradient of the result counts.
        """
        return None

    def kl_terms(self, value: bool = True, known: Container[Hashable] = ()) -> KLTerms:
        """The KL in terms, by a key that says which tensors a term is about.

        A term whose key is `known` has been counted by a module that shares the tensors, and is
        left out. Gates that share a weight, but not their rates, each have a term for it under one
        key: the weight counts once, so these are averaged.
        """
        self.asked_for_kl()
        term = None if self.kl_key() in known else self.kl(value)
        return {} if term is None else {self.kl_key(): term}

    def kl_key(self) -> Hashable:
        """Modules with equal keys share all of their tensors."""
        return id(self)

    def count_pass(self) -> None:
        """Count a noisy pass, to warn where parameters are trained and nobody asks for the KL."""
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return
        state = vars(self)  # what nn.Module does on setting an attribute is slow
        state["_passes"] = passes = self._passes + 1
        if passes == 1:
            state["_updates"] = self._parameter_updates()
        elif passes == _PASSES:
            state["_passes"] = 0
            if self._parameter_updates() != self._updates and self._owes_kl():
                state["_passes"] = -math.inf  # once
                warnings.warn(_NO_KL, stacklevel=2)

    def asked_for_kl(self) -> None:
        """The KL is asked for: count from the beginning."""
        if not torch.compiler.is_compiling():
            vars(self)["_passes"] = 0

    def _parameter_updates(self) -> int:
        return sum(p._version for p in self.parameters() if p.requires_grad)

    def _owes_kl(self) -> bool:
        """Whether this module has a KL, which training should count."""
        return True

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
    found: dict[Hashable, list[Tensor]] = {}
    for module in noisy_modules(net).values():
        for key, term in module.kl_terms(value, found).items():
            found.setdefault(key, []).append(term)
    if not found:
        return torch.zeros((), device=next(net.parameters()).device)
    means = [t[0] if len(t) == 1 else torch.stack(t).mean() for t in found.values()]
    return torch.stack(means).sum()


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
