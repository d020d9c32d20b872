"""What all noisy modules share: the sampling switch, their KL, and the walks over a net."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Container, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.encoder import update_encoder_fastpath
from vardrop._core.errors import VardropError
from vardrop._core.sharding import is_sharded, local_part, sum_over_shards
from vardrop._core.torch_private import in_transform
from vardrop.divergence import kl_divergence, shared_in_step
from vardrop.functional import gaussian_output
from vardrop.posteriors import Axes, Posterior, Tensors
from vardrop.priors import Prior

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Kind = Literal["weight", "input", "output"]
KLTerms = dict[Hashable, Tensor]
Module = TypeVar("Module", bound=nn.Module)

# A layer whose parameters change in the second half of so many passes is being trained; steps that
# gather gradients, or draws of one step, change no parameters in between.
_PASSES = 100
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_LOG_ALPHA = 3.0  # beyond it a weight is noise: a drop rate of 0.95 (Molchanov et al. 2017)
_NO_KL = (
    f"A noisy net is being trained, but nobody asked for its KL in {_PASSES} passes: nothing then "
    "keeps the noise from vanishing. Minimise vardrop.ELBO(net, likelihood, num_data)(x, y).loss, "
    "or add vardrop.kl(net) / num_data to the loss. ELBO(..., beta=0) trains without it."
)


@dataclass(frozen=True, eq=False)
class Relevance:
    """How much each weight (or unit) matters to a module, and the method's rule to keep it.

    `score` has the shape of the weight, or one entry per input or output unit, as `kind` says.
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


@dataclass(frozen=True, eq=False)
class NoisyTensor:
    """One noisy tensor of a layer: a view of what the layer holds now, made at each call.

    w ~ q with E w = `mean`; `noise` and `hyper` are the tensors of posterior and prior by their own
    names, and `axes` says which axes run over inputs and outputs (a bias has no inputs).
    `cached_variance` is Var w where a training step has computed it already.

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
        """The rows from `start` to `stop`, along axis 0, with their noise."""
        size = len(self.mean)

        def cut(tensors: Tensors) -> dict[str, Tensor]:
            return {
                name: t[start:stop] if t.dim() and len(t) == size else t
                for name, t in tensors.items()
            }

        known = None if self.cached_variance is None else self.cached_variance[start:stop]
        noise, hyper = cut(self.noise), cut(self.hyper)
        mean = self.mean[start:stop]
        return NoisyTensor(mean, self.posterior, self.prior, noise, hyper, self.axes, known)

    def variance(self) -> Tensor:
        """Var w, in the shape of the mean."""
        if self.cached_variance is not None:
            return self.cached_variance
        return self.posterior.variance(self.mean, self.noise)

    def draw(self, batch: tuple[int, ...] = ()) -> Tensor:
        """Standard noise for one draw, or for a batch of draws."""
        return self.posterior.draw(self.mean, self.axes, batch)

    def sample(self, noise: Tensor) -> Tensor:
        """w for standard noise from `draw`."""
        if self.cached_variance is not None and noise.shape == self.mean.shape:
            return gaussian_output(self.mean, self.cached_variance, noise)
        return self.posterior.sample(self.mean, noise, self.noise)

    def perturbation(self, noise: Tensor) -> Tensor:
        """w - E w for standard noise from `draw`."""
        return self.posterior.perturbation(self.mean, noise, self.noise)

    def log_alpha(self) -> Tensor:
        """log(Var w / (E w)^2); broadcastable to the shape of the mean."""
        return self.posterior.log_alpha(self.mean, self.noise)

    def adds_variances(self) -> bool:
        """Whether an output's variance is the sum over its weights: no two of them share noise."""
        return self.posterior.adds_variances(self.mean, self.axes)

    def kl(self, value: bool = True) -> Tensor | None:
        """KL(q || p), summed; None without a prior. With `value=False` only its gradient counts."""
        if self.prior is None:
            return None
        if is_sharded(self.mean):
            part = self._local(self.mean).kl(value)
            return part if part is None or not value else sum_over_shards(part, self.mean)
        shared = shared_in_step(self.posterior, self.prior, self.mean, self.noise)
        if shared is not None:
            return shared.kl(value)
        values = self.posterior, self.prior, self.mean, self.axes, self.noise, self.hyper
        return kl_divergence(*values, value)

    def _local(self, mean: DTensor) -> NoisyTensor:
        """The part that this process holds, where the tensors are spread over several."""
        noise, hyper = (
            {name: local_part(t, mean) for name, t in tensors.items()}
            for tensors in (self.noise, self.hyper)
        )
        return NoisyTensor(mean.to_local(), self.posterior, self.prior, noise, hyper, self.axes)

    def with_shared_variance(self, training: bool) -> NoisyTensor:
        """The tensor as products see it, with what a training step shares computed once.

        In training mode the mean is the posterior's `training_mean`.
        """
        mean, variance = self.mean, self.cached_variance
        if self.prior is not None:
            shared = shared_in_step(self.posterior, self.prior, mean, self.noise)
            if shared is not None:
                mean, variance = shared.mean, shared.variance
        if training:
            mean = self.posterior.training_mean(mean, self.noise, variance)
        if mean is self.mean:
            return self
        return replace(self, mean=mean, cached_variance=variance)

    def relevance(self) -> Relevance | None:
        """log alpha of every weight and the rule to keep it; None where noise selects nothing."""
        if self.posterior.zero_mean or not self.posterior.learned:
            return None
        return Relevance(self.log_alpha().expand_as(self.mean), _LOG_ALPHA, False, "weight")


class Noisy(nn.Module):
    """Base of layers, gates and heads that draw noise.

    `sampling` is None (noise while training), True or False; it never touches `training`.
    """

    sampling: bool | None = None
    transient: ClassVar[tuple[str, ...]] = ("_switches",)  # of one call; a clone starts without
    encloses: ClassVar[bool] = True  # modules inside belong to it, and are converted with it
    _passes: float = 0  # noisy passes with gradients since the KL was last asked for
    _checksums: tuple[int, ...] = ()  # of the parameters, halfway through these passes

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
        self.reset_kl_counter()
        term = None if self.kl_key() in known else self.kl(value)
        return {} if term is None else {self.kl_key(): term}

    def kl_key(self) -> Hashable:
        """Modules with equal keys share all of their tensors."""
        return id(self)

    def warn_if_kl_unused(self) -> None:
        """Count a noisy pass, to warn where parameters are trained and nobody asks for the KL."""
        if torch.compiler.is_compiling() or in_transform():
            return
        if not (self.training and torch.is_grad_enabled()):
            return
        state = vars(self)  # what nn.Module does on setting an attribute is slow
        state["_passes"] = passes = self._passes + 1
        if passes == _PASSES // 2:  # which steps that ask for the KL do not reach
            state["_checksums"] = self._parameter_checksums()
        elif passes == _PASSES:
            state["_passes"] = 0
            if self._parameter_checksums() != self._checksums and self._owes_kl():
                state["_passes"] = -math.inf  # once
                warnings.warn(_NO_KL, stacklevel=2)

    def reset_kl_counter(self) -> None:
        """The KL is asked for: count from the beginning."""
        if not torch.compiler.is_compiling():
            vars(self)["_passes"] = 0

    def _parameter_checksums(self) -> tuple[int, ...]:
        """The sum of the bits of every parameter that is trained, which any update changes.

        A fused optimizer does not raise a tensor's version.
        """
        trained = (p.detach() for p in self.parameters() if p.requires_grad)
        own = (p.to_local() if is_sharded(p) else p for p in trained)
        return tuple(int(p.view(_BITS[p.element_size()]).sum()) for p in own)

    def _owes_kl(self) -> bool:
        """Whether this module has a KL, which training should count."""
        return True

    def noisy_tensors(self) -> dict[str, NoisyTensor]:
        """The noisy tensors of this module by name, as they are now; views, not to be kept."""
        return {}

    def get_log_alpha(self) -> Tensor | None:
        """log of a unit's noise variance over squared mean, or None without such a ratio."""
        return None

    def relevance(self) -> Relevance | None:
        """What the method's own rule keeps of the units, or None where it selects nothing."""
        return None

    def noise_tensors(self) -> Iterator[Tensor]:
        """Parameters that describe noise or its prior, of this module alone."""
        yield from ()

    def noise_names(self) -> Iterable[str]:
        """Names in the module's state of all tensors of its noise; the means are not among them."""
        return ()


def named_modules_of(net: nn.Module, kind: type[Module]) -> dict[str, Module]:
    """The modules of one type, or of its subclasses, by name, each once.

    >>> list(named_modules_of(nn.Sequential(nn.Linear(2, 1), nn.ReLU()), nn.Linear))
    ['0']
    """
    return {name: m for name, m in net.named_modules() if isinstance(m, kind)}


def noisy_modules(net: nn.Module) -> dict[str, Noisy]:
    """The noisy modules of a net by name, each once; an error where there is none."""
    check_net(net)
    found = named_modules_of(net, Noisy)
    if not found:
        kinds = sorted({type(m).__name__ for m in net.modules()})
        raise VardropError(
            f"Expected `net` to have noisy modules, but got {', '.join(kinds)}. "
            "Call vardrop.convert(net, recipe) first."
        )
    return found


def has_noise(net: nn.Module) -> bool:
    """Whether a net has noisy modules."""
    return any(isinstance(m, Noisy) for m in net.modules())


def enclosed(net: nn.Module) -> set[int]:
    """The ids of modules that belong to a noisy one: gates and projections inside a layer."""
    owners = (m for m in net.modules() if isinstance(m, Noisy) and m.encloses)
    return {id(c) for m in owners for c in m.modules() if c is not m}


def training_mode(module: nn.Module) -> bool:
    """Whether a module is in training mode, whatever the switch says to its code."""
    own: bool = vars(module).get("training", module.training)
    return own


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Run a net in evaluation mode for a while; every module gets its own mode back."""
    training = [m for m in net.modules() if training_mode(m)]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True, eq=False)
class _Switch:
    """One `sampling` that is open: what it wants, and in which thread it was entered."""

    on: bool
    thread: int


_switching = threading.Lock()


@contextmanager
def sampling(net: nn.Module, on: bool = True) -> Iterator[nn.Module]:
    """Switch the noise of a net on (or off) for a while; modes and BatchNorm stay as they are.

    May be nested and left in any order: the one that was entered last, of those still open, counts.
    The switch is a flag on the modules, which all threads see, so a second thread that wants to
    switch the same modules meanwhile is refused; `predict` and `draw` work in any thread.

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
            _check_thread(modules, switch.thread)
            for m in modules:
                # The first entry is what the flag was before, which comes back at the end.
                m.__dict__.setdefault("_switches", [m.sampling]).append(switch)
                m.sampling = on
        yield net
    finally:
        with _switching:
            for m in modules:
                _leave(m, switch)


def _check_thread(modules: list[Noisy], thread: int) -> None:
    if any(s.thread != thread for m in modules for s in m.__dict__.get("_switches", [])[1:]):
        raise VardropError(
            "Expected `sampling(net)` from one thread at a time, but got a second one while "
            "another thread is inside. Use vardrop.predict or vardrop.draw, or a copy of the net "
            "for each thread."
        )


def _leave(module: Noisy, switch: _Switch) -> None:
    switches = module.__dict__.get("_switches", [])
    if switch not in switches:  # an exception came before this module was reached
        return
    switches.remove(switch)
    if len(switches) > 1:
        module.sampling = switches[-1].on
    else:
        module.sampling = module.__dict__.pop("_switches")[0]


def kl(net: nn.Module, value: bool = True) -> Tensor:
    """The KL of a net: the sum over its noisy modules, a shared module or tied weight once.

    With `value=False` the gradient is exact and the value unspecified, which is faster.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(3, 2), vd.ard())
    >>> vd.kl(net).shape
    torch.Size([])
    """
    total = sum_kl(noisy_modules(net).values(), value)
    return torch.zeros((), device=next(net.parameters()).device) if total is None else total


def sum_kl(modules: Iterable[Noisy], value: bool = True) -> Tensor | None:
    """The KL of noisy modules, tied weights once; None if they have none."""
    terms: dict[Hashable, list[Tensor]] = {}
    for module in modules:
        for key, term in module.kl_terms(value, terms).items():
            terms.setdefault(key, []).append(term)
    means = [t[0] if len(t) == 1 else torch.stack(t).mean() for t in terms.values()]
    return torch.stack(means).sum() if means else None


def noisy_weights(net: nn.Module) -> Iterator[tuple[str, str, NoisyTensor]]:
    """Every noisy weight of a net: the name it is reported by, its state_dict key and a view."""
    for name, module in noisy_modules(net).items():
        for own, tensor in module.noisy_tensors().items():
            if tensor.axes.input:  # biases have none
                yield tensor_name(name, own), f"{name}.{own}".lstrip("."), tensor


def tensor_name(module: str, tensor: str) -> str:
    """The name under which a noisy tensor is reported: the module's for its `weight`.

    >>> tensor_name("fc", "weight"), tensor_name("rnn", "weight_hh_l0")
    ('fc', 'rnn.weight_hh_l0')
    """
    return module if tensor == "weight" else f"{module}.{tensor}".lstrip(".")


def log_alpha(net: nn.Module) -> dict[str, Tensor]:
    """log alpha of every noisy weight and gate that has one, by module name, detached.

    A weight under another name than `weight` is `<module>.<name>`.

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
    """What each method keeps, by the name of its module, detached.

    Weight posteriors: log alpha, one per weight, kept below 3; a weight under another name than
    `weight` is `<module>.<name>`. Gates: the method's own score, one per unit; a gate inside a
    layer is named `<layer>.gate`, and `kind` says whether its units are the layer's inputs or its
    outputs.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), vd.sparse_vd(log_sigma2=-30.0))
    >>> {name: (r.kind, int(r.kept.sum())) for name, r in vd.relevance(net).items()}
    {'0': ('weight', 6)}
    """
    with torch.no_grad():
        weights = {name: tensor.relevance() for name, _, tensor in noisy_weights(net)}
        gates = {name: module.relevance() for name, module in noisy_modules(net).items()}
    return {name: r for name, r in {**gates, **weights}.items() if r is not None}
