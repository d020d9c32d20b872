"""The base of noisy modules: the sampling switch, the KL, and iteration over a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.encoder import update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.sharding import is_sharded, local_part, sum_over_shards
from vardrop.divergence import kl_divergence, shared_in_step
from vardrop.functional import gaussian_output
from vardrop.posteriors import Axes, Posterior, Tensors
from vardrop.priors import Prior

Kind = Literal["weight", "input", "output"]
KLTerms = dict[Hashable, Tensor]
Module = TypeVar("Module", bound=nn.Module)
_LOG_ALPHA = 3.0  # the threshold of Molchanov et al. 2017, a drop rate of 0.95


@dataclass(frozen=True, eq=False)
class Relevance:
    """The relevance of each weight or unit of a module, and the rule to retain it.

    Args:
        score: in the shape of the weight, or one entry per unit.
        threshold: of the score.
        keep_above: whether scores above the threshold are retained, else scores below.
        kind: "weight", or the side of the units: "input" or "output".
    """

    score: Tensor
    threshold: float
    keep_above: bool
    kind: Kind

    @property
    def kept(self) -> Tensor:
        """True for each weight or unit that the rule retains."""
        above, below = self.score > self.threshold, self.score < self.threshold
        return above if self.keep_above else below


@dataclass(frozen=True, eq=False)
class NoisyTensor:
    """One noisy tensor of a layer: a view of the current tensors, made at each call.

    Args:
        mean: E w.
        posterior: q(w).
        prior: p(w), or None.
        noise: the tensors of the posterior by name.
        hyper: the tensors of the prior by name.
        axes: of inputs and outputs. A bias has no inputs.
        cached_variance: Var w if a training step has already computed it.

    >>> import torch, vardrop as vd
    >>> layer = vd.convert(torch.nn.Linear(3, 2), vd.sparse_vd(log_sigma2=0.0))
    >>> weight = layer.noisy_tensors()["weight"]
    >>> weight.mean is layer.weight, weight.variance().sum()
    (True, tensor(6., grad_fn=<SumBackward0>))
    """

    mean: Tensor
    posterior: Posterior
    prior: Prior | None
    noise: Tensors
    hyper: Tensors
    axes: Axes
    cached_variance: Tensor | None = None

    def rows(self, start: int, stop: int) -> NoisyTensor:
        """The rows from `start` to `stop`, along axis 0, with their noise.

        Args:
            start: the first row.
            stop: the row after the last.

        Returns:
            A view of these rows.
        """
        size = len(self.mean)
        return self._take(lambda t: t[start:stop] if t.dim() and len(t) == size else t)

    def _take(self, part: Callable[[Tensor], Tensor]) -> NoisyTensor:
        """A view of a part of every tensor."""
        noise, hyper = (
            {name: part(t) for name, t in tensors.items()} for tensors in (self.noise, self.hyper)
        )
        variance = None if self.cached_variance is None else part(self.cached_variance)
        mean = part(self.mean)
        return replace(self, mean=mean, noise=noise, hyper=hyper, cached_variance=variance)

    def variance(self) -> Tensor:
        """Var w, in the shape of the mean."""
        if self.cached_variance is not None:
            return self.cached_variance
        return self.posterior.variance(self.mean, self.noise)

    def draw(self, batch: tuple[int, ...] = ()) -> Tensor:
        """Standard noise for one draw, or for a batch of draws.

        Args:
            batch: the shape of the batch of draws.

        Returns:
            The noise.
        """
        return self.posterior.draw(self.mean, self.axes, batch)

    def sample(self, noise: Tensor) -> Tensor:
        """w for standard noise from `draw`.

        Args:
            noise: from `draw`.

        Returns:
            The weights.
        """
        if self.cached_variance is not None and noise.shape == self.mean.shape:
            return gaussian_output(self.mean, self.cached_variance, noise)
        return self.posterior.sample(self.mean, noise, self.noise)

    def perturbation(self, noise: Tensor) -> Tensor:
        """w - E w for standard noise from `draw`.

        Args:
            noise: from `draw`.

        Returns:
            The perturbations of the weights.
        """
        return self.posterior.perturbation(self.mean, noise, self.noise)

    def log_alpha(self) -> Tensor:
        """log(Var w / (E w)^2); broadcastable to the shape of the mean."""
        return self.posterior.log_alpha(self.mean, self.noise)

    def kl(self, value: bool = True) -> Tensor | None:
        """KL(q || p), summed, or None without a prior; only its gradient with `value=False`.

        Args:
            value: with False only the gradient is exact.

        Returns:
            A tensor without axes, or None.
        """
        if self.prior is None:
            return None
        if is_sharded(self.mean):  # of the part that this process holds
            part = self._take(partial(local_part, like=self.mean)).kl(value)
            return part if part is None or not value else sum_over_shards(part, self.mean)
        shared = shared_in_step(self.posterior, self.prior, self.mean, self.noise, self.hyper)
        if shared is not None:
            return shared.kl(value)
        tensors = self.mean, self.axes, self.noise, self.hyper
        return kl_divergence(self.posterior, self.prior, *tensors, value)

    def with_shared_variance(self, training: bool) -> NoisyTensor:
        """The tensor for products, with values that a training step shares computed once.

        In training mode the mean is the `training_mean` of the posterior.

        Args:
            training: whether the layer is in training mode.

        Returns:
            The tensor.
        """
        mean, variance = self.mean, self.cached_variance
        shared = shared_in_step(self.posterior, self.prior, mean, self.noise, self.hyper)
        if shared is not None:
            mean, variance = shared.mean, shared.variance
        if training:
            mean = self.posterior.training_mean(mean, self.noise, variance)
        return self if mean is self.mean else replace(self, mean=mean, cached_variance=variance)

    def relevance(self) -> Relevance | None:
        """log alpha of every weight and the rule to retain it, or None without such a rule."""
        if self.posterior.zero_mean or not self.posterior.learned:
            return None
        return Relevance(self.log_alpha().expand_as(self.mean), _LOG_ALPHA, False, "weight")


class Noisy(nn.Module):
    """Base of layers, gates and heads that draw noise.

    `sampling` is None (noise in training mode), True or False. It does not change `training`.
    """

    sampling: bool | None = None
    transient: ClassVar[tuple[str, ...]] = ("_switches",)  # state of one call, not for clones
    encloses: ClassVar[bool] = True  # modules inside belong to it, and are converted with it
    passes_without_kl: float = 0  # noisy passes with gradients since the KL was last used

    @property
    def is_sampling(self) -> bool:
        """Whether a forward pass draws noise now."""
        return self.training if self.sampling is None else self.sampling

    def kl(self, value: bool = True) -> Tensor | None:
        """KL of the noise, or None without KL. `value=False`: only its gradient is exact."""
        return None

    def kl_terms(self, value: bool = True, counted: Container[Hashable] = ()) -> KLTerms:
        """The terms of the KL, by a key that identifies the tensors of a term.

        A term with a key in `counted` is left out, because a module that shares its tensors has
        counted it. Gates that share a weight, but not their rates, have terms under the same key,
        which are averaged, because the weight counts once.
        """
        if not torch.compiler.is_compiling():
            vars(self)["passes_without_kl"] = 0  # the KL is used
        term = None if self.kl_key() in counted else self.kl(value)
        return {} if term is None else {self.kl_key(): term}

    def kl_key(self) -> Hashable:
        """Modules with equal keys share all of their tensors."""
        return id(self)

    def owes_kl(self) -> bool:
        """Whether this module has a KL that training should use."""
        return True

    def noisy_tensors(self) -> dict[str, NoisyTensor]:
        """The current noisy tensors of this module by name. Do not keep these views."""
        return {}

    def get_log_alpha(self) -> Tensor | None:
        """log of a unit's noise variance over squared mean, or None without such a ratio."""
        return None

    def relevance(self) -> Relevance | None:
        """The relevance of the units and the rule to retain them, or None without such a rule."""
        return None

    def noise_tensors(self) -> Iterator[Tensor]:
        """The parameters of the noise and its prior, of this module only."""
        names = set(self.noise_names())
        return (parameter for name, parameter in self.named_parameters() if name in names)

    def noise_names(self) -> Iterable[str]:
        """The names of all noise tensors in the state of the module, without the means."""
        return ()


def named_modules_of(net: nn.Module, kind: type[Module]) -> dict[str, Module]:
    """The modules of one type, or of its subclasses, by name, each once.

    >>> list(named_modules_of(nn.Sequential(nn.Linear(2, 1), nn.ReLU()), nn.Linear))
    ['0']
    """
    return {name: m for name, m in net.named_modules() if isinstance(m, kind)}


def noisy_modules(net: nn.Module) -> dict[str, Noisy]:
    """The noisy modules of a model by name, each once. Raises an error if there are none."""
    check_net(net)
    modules = named_modules_of(net, Noisy)
    if not modules:
        kinds = sorted({type(m).__name__ for m in net.modules()})
        raise VardropError(
            f"Expected `net` to have noisy modules, but got {', '.join(kinds)}. "
            "Call vardrop.convert(net, recipe) first."
        )
    return modules


def has_noise(net: nn.Module) -> bool:
    """Whether a model has noisy modules."""
    return any(isinstance(m, Noisy) for m in net.modules())


def enclosed(net: nn.Module) -> set[int]:
    """The ids of modules that belong to a noisy one: gates and projections inside a layer."""
    owners = (m for m in net.modules() if isinstance(m, Noisy) and m.encloses)
    return {id(c) for m in owners for c in m.modules() if c is not m}


@dataclass(frozen=True, eq=False)
class _Switch:
    """An active `sampling` context: its switch, and the thread that entered it."""

    on: bool
    thread: int


_switching = threading.Lock()


@contextmanager
def sampling(net: nn.Module, on: bool = True) -> Iterator[nn.Module]:
    """Switch the noise of a model on or off. Training modes and BatchNorm are unchanged.

    Contexts can be nested and left in any order: the active context that was entered last applies.
    The switch is a flag on the modules, which all threads share. A second thread that enters a
    context of the same modules gets an error. `predict` and `draw` work in any thread.

    Args:
        net: a model with noisy modules.
        on: whether noise is drawn.

    Returns:
        A context, which yields the model.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1), vd.bayes_by_backprop()).eval()
    >>> with vd.sampling(net):
    ...     noisy = net(torch.ones(1, 2))
    >>> net.training, bool((noisy != net(torch.ones(1, 2))).all())
    (False, True)
    """
    check_type("on", on, bool, "True or False")
    modules, switch = list(noisy_modules(net).values()), _Switch(on, threading.get_ident())
    update_encoder_fastpath(net, Noisy)
    try:
        with _switching:
            if any(
                s.thread != switch.thread for m in modules for s in vars(m).get("_switches", [])[1:]
            ):
                raise VardropError(
                    "Expected `sampling(net)` from one thread at a time, but got a second one "
                    "while another thread is inside. Use vardrop.predict or vardrop.draw, or a "
                    "copy of the model for each thread."
                )
            for m in modules:
                # The first entry is the flag before, which is restored at the end.
                vars(m).setdefault("_switches", [m.sampling]).append(switch)
                m.sampling = on
        yield net
    finally:
        with _switching:
            for m in modules:
                switches = vars(m).get("_switches", [])
                if switch not in switches:  # an exception came before this module was reached
                    continue
                switches.remove(switch)
                m.sampling = switches[-1].on if len(switches) > 1 else vars(m).pop("_switches")[0]


def kl(net: nn.Module, value: bool = True) -> Tensor:
    """The KL of a model, summed over its noisy modules. Shared modules and ties count once.

    Args:
        net: a model with noisy modules.
        value: with False the gradient is exact and the value unspecified, which is faster.

    Returns:
        A tensor without axes.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.ard())
    >>> vd.kl(net).shape
    torch.Size([])
    """
    check_type("value", value, bool, "True or False")
    total = sum_kl(noisy_modules(net).values(), value)
    return torch.zeros((), device=next(net.parameters()).device) if total is None else total


def sum_kl(modules: Iterable[Noisy], value: bool = True) -> Tensor | None:
    """The KL of noisy modules, or None if they have none. Tied weights count once."""
    terms: dict[Hashable, list[Tensor]] = {}
    for module in modules:
        for key, term in module.kl_terms(value, terms).items():
            terms.setdefault(key, []).append(term)
    means = [t[0] if len(t) == 1 else torch.stack(t).mean() for t in terms.values()]
    return torch.stack(means).sum() if means else None


def noisy_weights(net: nn.Module) -> Iterator[tuple[str, str, NoisyTensor]]:
    """Yield for every noisy weight of a model its reported name, its state_dict key and a view."""
    for name, module in noisy_modules(net).items():
        for key, tensor in module.noisy_tensors().items():
            if tensor.axes.input:  # biases have none
                yield tensor_name(name, key), f"{name}.{key}".lstrip("."), tensor


def tensor_name(module: str, tensor: str) -> str:
    """The reported name of a noisy tensor: the name of its module if it is called `weight`.

    >>> tensor_name("fc", "weight"), tensor_name("rnn", "weight_hh_l0")
    ('fc', 'rnn.weight_hh_l0')
    """
    return module if tensor == "weight" else f"{module}.{tensor}".lstrip(".")


def log_alpha(net: nn.Module) -> dict[str, Tensor]:
    """log alpha of every noisy weight and gate, by module name, detached.

    A weight with another name than `weight` is `<module>.<name>`. Gates without an alpha are left
    out.

    Args:
        net: a model with noisy modules.

    Returns:
        Tensors that broadcast to the weights, or one entry per unit.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.sparse_vd())
    >>> {name: tuple(la.shape) for name, la in vd.log_alpha(net).items()}
    {'0': (2, 3)}
    """
    with torch.no_grad():
        weights = {name: tensor.log_alpha() for name, _, tensor in noisy_weights(net)}
        gates = {name: module.get_log_alpha() for name, module in noisy_modules(net).items()}
    return {name: la for name, la in {**gates, **weights}.items() if la is not None}


def relevance(net: nn.Module) -> dict[str, Relevance]:
    """The relevance of weights and units, by module name, detached.

    For weights the score is log alpha, retained below 3, with names as in `log_alpha`. For gates it
    is the score of the method, one per unit. A gate inside a layer is `<layer>.gate`, and `kind` is
    the side of the layer.

    Args:
        net: a model with noisy modules.

    Returns:
        The scores and rules of the modules that have them.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.sparse_vd(log_sigma2=-30.0))
    >>> {name: (r.kind, int(r.kept.sum())) for name, r in vd.relevance(net).items()}
    {'0': ('weight', 6)}
    """
    with torch.no_grad():
        weights = {name: tensor.relevance() for name, _, tensor in noisy_weights(net)}
        gates = {name: module.relevance() for name, module in noisy_modules(net).items()}
    return {name: r for name, r in {**gates, **weights}.items() if r is not None}
