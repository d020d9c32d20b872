"""`predict`: the predictive distribution of a noisy net, by samples, means or moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Picked,
    call,
    check_named,
    mapped,
    parts,
    plain_batch,
    rows,
    tensors_in,
)
from vardrop._core.checks import check_choice, check_integer, check_number
from vardrop._core.errors import VardropError
from vardrop._core.modules import clone_modules
from vardrop._core.sharding import called_through, is_spread
from vardrop.functional import GeneratorNoise, draw_from, restore_state_on_error
from vardrop.gates import check_functional_dropout
from vardrop.likelihoods import Likelihood, Objective, net_and_likelihood
from vardrop.prediction.functions import FunctionDraws, seed_of_a_call
from vardrop.prediction.moments import analytic, output_draws, passed
from vardrop.prediction.preparation import (
    Size,
    check_noise,
    may_draw,
    measured,
    prepared,
    row_limit,
)
from vardrop.prediction.result import Prediction, Reduction, join
from vardrop.prediction.ways import EstimatorDraws, MeanPass, SpreadDraws, Way

Mode = Literal["sample", "mean", "moments"]
Draw = Literal["estimator", "local", "weights"]
_SETTLING = 32  # draws between two looks at the tolerance


@restore_state_on_error
def predict(
    net: nn.Module | Objective,
    x: Tensor | Mapping[str, Any] | Iterable[object],
    samples: int = 32,
    *,
    mode: Mode = "sample",
    draw: Draw = "estimator",
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    memory: int = 2**28,
    tolerance: float | None = None,
    keep: int | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Prediction:
    """The predictive distribution of a noisy net: p(y | x) = E_w p(y | x, w).

    The net runs in eval mode with its noise on, on a private replica: the net itself, its modes and
    its BatchNorm are never touched, so several threads may predict with one net at a time.

    Args:
        net: a net with a posterior, gates, heads or dropout, whose output is one tensor or has
            `logits`; or an ELBO, which brings its likelihood along, a learned deviation included.
        x: inputs (N, ...): a tensor, or a dictionary of the net's arguments; or a loader of
            batches, each of them such an input or a tuple that begins with one.
        samples: how many draws.
        mode: "sample"; "mean", the net without noise (weight scaling); "moments", one analytic pass
            that carries mean and variance (then `samples` normal draws at the output).
        draw: "estimator", as the layers draw in training, whatever the batch. By request: "local",
            fresh noise for every example and position; "weights", whole functions: draw k is one
            net, so that examples and positions vary together. Dense layers have the same marginals
            in all three; a convolution keeps the covariance between positions with "weights" and
            drops it with "local", which changes the uncertainty after pooling or a dense layer.
        likelihood: what the output means: `Categorical()` logits by default (classes on axis 1),
            `Bernoulli()` logits, `Gaussian(std)` means, `HeteroscedasticGaussian()` means and log
            variances, or `Values()` without a noise of the targets.
        seed: makes the call repeatable whatever other threads draw, and leaves the global generator
            alone; without it a seed is drawn from there.
        memory: bytes that draws may take at once, beside those that are kept.
        tolerance: stop a batch early, once the standard error of each mean probability (of each
            mean value in regression) is below it.
        keep: how many draws to keep for intervals and for densities of values; all by default.
        output: picks the tensor from what the net returns, such as `lambda out: out[0]`.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> predict(net, torch.randn(5, 4), samples=8, seed=0)
    Prediction(5 rows, Categorical, 8 draws)

    Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", eq. 6; Wang & Manning 2013, "Fast
    dropout training" (moments).
    """
    model, meaning = net_and_likelihood(net, likelihood)
    options = Options(samples, mode, draw, meaning.fixed(), memory, tolerance, keep)
    return join(list(_Call(net, model, options, seed, output).predictions(x)))


def predict_batches(
    net: nn.Module | Objective,
    x: Iterable[object],
    samples: int = 32,
    *,
    likelihood: Likelihood | None = None,
    seed: int | None = None,
    output: Callable[[Any], Tensor] | None = None,
    **more: Any,
) -> Iterator[Prediction]:
    """The predictions of a loader, batch after batch: memory holds one of them at a time.

    They are those of `predict` of the whole loader, for the same seed.

    Args:
        net, samples, likelihood, seed, output: as for `predict`.
        x: a loader of batches, each of them an input or a tuple that begins with one.
        more: `mode`, `draw`, `memory`, `tolerance` and `keep`, as for `predict`.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> for p in vd.predict_batches(net, torch.randn(5, 4).split(2), samples=8):
    ...     print(tuple(p.probs.shape))
    (2, 3)
    (2, 3)
    (1, 3)
    """
    given = {"mode": "sample", "draw": "estimator", "memory": 2**28, "tolerance": None}
    given |= {"keep": None}
    if unknown := sorted(set(more) - set(given)):
        raise TypeError(f"predict_batches() got an unexpected keyword argument {unknown[0]!r}")
    if isinstance(x, Tensor | Mapping):
        raise VardropError(
            f"Expected `x` to be a loader of batches, but got {type(x).__name__}. Split it, as by "
            "x.split(1000), or call `predict`."
        )
    model, meaning = net_and_likelihood(net, likelihood)
    options = Options(samples, likelihood=meaning.fixed(), **{**given, **more})
    return _Call(net, model, options, seed, output).predictions(x)


class _Call:
    """One call: a net with what it was asked, whose draws go on from batch to batch."""

    def __init__(
        self,
        given: nn.Module | Objective,
        model: nn.Module,
        options: Options,
        seed: int | None,
        output: Callable[[Any], Tensor] | None,
    ) -> None:
        pick = getattr(given, "output", None) if output is None else output
        self.net = model if pick is None else Picked(model, pick)
        self.given, self.options, self.seed = given, options, seed
        self.engine: Engine | None = None
        if options.mode != "mean":
            check_noise(self.net)
        # What draws nothing takes no seed from the global generator.
        draws = options.mode == "sample" or (options.mode == "mean" and may_draw(self.net))
        self.drawn = seed_of_a_call(seed) if draws else None
        self.generators: dict[torch.device, torch.Generator] = {}

    def predictions(self, x: Any) -> Iterator[Prediction]:
        """The prediction of every batch."""
        for batch in batches(self.net, x):
            yield self.one(batch)

    @restore_state_on_error
    def one(self, batch: Any) -> Prediction:
        own = (
            nullcontext()
            if self.drawn is None
            else draw_from(GeneratorNoise(self.drawn, self.generators))
        )
        with own, torch.no_grad():
            if self.engine is None:
                self.engine = Engine(self.net, self.options, self.given)
            return join(list(self.engine(batch, self.seed or 0)))


@dataclass(frozen=True)
class Options:
    """How to predict."""

    samples: int
    mode: Mode
    draw: Draw
    likelihood: Likelihood
    memory: int
    tolerance: float | None
    keep: int | None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("sample", "mean", "moments"))
        check_choice("draw", self.draw, ("estimator", "local", "weights"))
        check_integer("samples", self.samples)
        check_integer("memory", self.memory)
        if self.keep is not None:
            check_integer("keep", self.keep, at_least=0)
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance, above=0)

    def reduction(self) -> Reduction:
        keep = self.samples if self.keep is None else min(self.keep, self.samples)
        return Reduction(self.likelihood, keep)


class Engine:
    """A net with options; what can serve several batches is made once."""

    def __init__(
        self, net: nn.Module, options: Options, given: nn.Module | Objective | None = None
    ) -> None:
        self.options, self.device = options, device_of(net)
        self.unchecked = None if options.mode == "mean" or is_spread(net) else net
        if is_spread(net):
            self.way: Way = _spread(net, options, given)
        elif options.mode == "moments":
            self.quiet = prepared(net, noise=False)
            self.net = analytic(self.quiet)
            self.sizes: dict[torch.Size, Size] = {}
        else:
            self.way = _way(net, options)

    def __call__(self, x: Any, seed: int) -> Iterator[Prediction]:
        """The predictions of a batch, in as many parts as the memory asks for.

        Draws come from the generator of the call; the seed is that of draws at an analytic output.
        """
        return self._by_moments(x, seed) if self.options.mode == "moments" else self._by_draws(x)

    def _check_dropout(self, x: Any) -> None:
        """Refuse a net with dropout that draws would be without, at its first rows."""
        if self.unchecked is not None:
            check_functional_dropout(self.unchecked, x)
            self.unchecked = None

    def _by_draws(self, x: Any) -> Iterator[Prediction]:
        most, count = self.way.rows(x), rows(x)
        for part in (x,) if most >= count else parts(x, most):
            self._check_dropout(part)
            reduction, length = self.options.reduction(), rows(part)
            for block in self.way(part, self.options.samples):
                reduction.add(_checked(block, length))
                if reduction.settled(self.options.tolerance):
                    break
            yield reduction.result()

    def _by_moments(self, x: Any, seed: int) -> Iterator[Prediction]:
        samples, memory, locations = (
            self.options.samples,
            self.options.memory,
            self.options.likelihood.locations,
        )
        if not isinstance(x, Tensor):
            raise VardropError(
                f'Expected `x` to be one tensor for mode="moments", but got {type(x).__name__}. '
                'Predict with mode="sample".'
            )
        most = row_limit(self.quiet, self._size(x), x, memory) if len(x) > 2 else len(x)
        for part in x.split(most):
            self._check_dropout(part)
            found, reduction = passed(self.net, part), self.options.reduction()
            for block in output_draws(found, samples, seed, memory):
                reduction.add(_checked(block, len(part)))
            yield replace(
                reduction.result(),
                mean=locations(found.mean),
                output_variance=locations(found.variance),
                analytic=True,
            )

    def _size(self, x: Tensor) -> Size:
        """What one row holds on its way through the net."""
        if x.shape[1:] not in self.sizes:
            self.sizes[x.shape[1:]] = measured(clone_modules(self.quiet), x, from_start=True)
        return self.sizes[x.shape[1:]]


def _way(net: nn.Module, options: Options) -> Way:
    if options.mode == "mean":
        return MeanPass(net)
    if options.draw == "weights":
        return FunctionDraws(net, options.memory)
    block = None if options.tolerance is None else _SETTLING
    return EstimatorDraws(net, options.memory, options.draw == "local", block)


def _spread(net: nn.Module, options: Options, given: Any) -> Way:
    if options.mode == "moments" or options.draw != "estimator":
        raise VardropError(
            "Expected mode='sample' or 'mean' with draw='estimator' for a net whose tensors are "
            f"spread over processes, but got mode={options.mode!r} with draw={options.draw!r}."
        )
    run = called_through(given, "outputs") if hasattr(given, "outputs") else partial(call, net)
    return SpreadDraws(net, run, options.mode == "sample")


def _checked(block: Tensor, rows: int) -> Tensor:
    if block.dim() < 2 or block.shape[1] != rows:
        raise VardropError(
            f"Expected the output to have {rows} rows as the input has, but got shape "
            f"{tuple(block.shape[1:])}."
        )
    return block


def device_of(net: nn.Module) -> torch.device | None:
    """Where the first tensor of a net is; None where it has none."""
    found = next(chain(net.parameters(), net.buffers()), None)
    return None if found is None else found.device


def batches(net: nn.Module, data: Any) -> Iterator[Any]:
    """The inputs of one batch or of a loader, checked, on the device of the net."""
    return batches_on(device_of(net), data)


def batches_on(device: torch.device | None, data: Any) -> Iterator[Any]:
    """The inputs of one batch or of a loader, checked, on a device."""
    count = 0
    for batch in [data] if isinstance(data, Tensor | Mapping) else data:
        x = plain_batch(batch[0] if isinstance(batch, tuple | list) and batch else batch)
        if not tensors_in(x):
            raise VardropError(
                f"Expected batches to be tensors or dictionaries of tensors, or tuples that begin "
                f"with such an input, but got {type(batch).__name__}. Wrap the loader."
            )
        _check_values(x)
        count += 1
        yield x if device is None else mapped(lambda t: t.to(device), x)
    if count == 0:
        raise VardropError("Expected `x` to give at least one batch, but got an empty loader.")


def _check_values(x: Any) -> None:
    if isinstance(x, Tensor) and (x.dim() == 0 or x.shape[0] == 0):
        raise VardropError(f"Expected `x` to have rows, but got shape {tuple(x.shape)}.")
    if rows(x) == 0:
        raise VardropError("Expected `x` to have rows, but got none.")
    check_named(x)
    named = x if isinstance(x, Mapping) else {"x": x}
    for name, tensor in ((n, t) for n, part in named.items() for t in tensors_in(part)):
        # The sum is one cheap pass, and finite unless a value is not, or it overflows.
        masks = tensor.is_floating_point() and "mask" not in name  # which may hold -infinity
        if masks and not (math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())):
            bad = int((~tensor.isfinite()).sum())
            raise VardropError(
                f"Expected `{name}` to be finite, but got {bad} values that are NaN or infinite. "
                "Clean the input first."
            )
