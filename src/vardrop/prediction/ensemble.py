"""`predict`: the predictive distribution of a noisy net, by samples, means or moments."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from vardrop.errors import VardropError
from vardrop.prediction.chains import chain, chain_draws
from vardrop.prediction.cost import Call, calls, cheaper, chunk_size, first_noisy, row_limit
from vardrop.prediction.functions import FunctionSampler
from vardrop.prediction.local import local_draws
from vardrop.prediction.modes import batches, check_noise, prepared, seeded
from vardrop.prediction.moments import output_draws, propagate
from vardrop.prediction.outputs import Likelihood, check_likelihood
from vardrop.prediction.progress import Progress
from vardrop.prediction.result import Prediction, join
from vardrop.prediction.selective import select
from vardrop.prediction.stream import Reduction

Mode = Literal["sample", "mean", "moments", "selective"]
Draw = Literal["auto", "local", "weights"]
_BLOCK = 8  # whole-function draws that are reduced together
_SETTLING = 32  # draws between two looks at the tolerance


@dataclass(frozen=True)
class _Options:
    samples: int
    mode: Mode
    draw: Draw
    likelihood: Likelihood
    noise_std: float
    seed: int | None
    chunk: int | None
    memory: int
    tolerance: float | None
    keep: int

    def __post_init__(self) -> None:
        check_likelihood(self.likelihood, self.noise_std)
        _check_choice("mode", self.mode, ("sample", "mean", "moments", "selective"))
        _check_choice("draw", self.draw, ("auto", "local", "weights"))
        for name, value in (
            ("samples", self.samples),
            ("chunk", self.chunk),
            ("memory", self.memory),
        ):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise VardropError(f"Expected `{name}` to be at least 1, but got {value}.")
        if self.keep < 0:
            raise VardropError(f"Expected `keep` to be at least 0, but got {self.keep}.")
        if self.tolerance is not None and not self.tolerance > 0:
            raise VardropError(f"Expected `tolerance` to be positive, but got {self.tolerance}.")

    def reduction(self) -> Reduction:
        return Reduction(self.likelihood, self.noise_std, min(self.keep, self.samples))


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise VardropError(f"Expected `{name}` to be one of {', '.join(known)}, but got {value!r}.")


def predict(
    net: nn.Module,
    x: Tensor | Iterable[object],
    samples: int = 32,
    *,
    mode: Mode = "sample",
    draw: Draw = "auto",
    likelihood: Likelihood = "categorical",
    noise_std: float = 0.0,
    seed: int | None = None,
    chunk: int | None = None,
    memory: int = 2**28,
    tolerance: float | None = None,
    keep: int = 100,
    threshold: float | None = None,
    kappa: dict[str, Tensor] | None = None,
    progress: bool = False,
) -> Prediction:
    """The predictive distribution of a noisy net: p(y | x) = E_w p(y | x, w).

    The net runs in eval mode with its noise on; its modes, its BatchNorm and (with `seed`) the
    global generator are left as they were, also when an exception passes through.

    Args:
        net: a net with a posterior, gates, heads or dropout; its output is one tensor.
        x: inputs (N, ...), or a loader of batches, each a tensor or a tuple that begins with one.
        samples: how many draws.
        mode: "sample"; "mean", the net without noise (weight scaling); "moments", one analytic pass
            that carries mean and variance (then `samples` normal draws at the output); "selective",
            samples for the weights whose |kappa| exceeds `threshold`, the mean for the others.
        draw: "local", fresh noise for every example; "weights", whole functions; both have the same
            marginals a layer, and "auto" takes the cheaper.
        likelihood: what the output means: "categorical" logits (classes on axis 1), "bernoulli"
            logits, "gaussian" values with deviation `noise_std`, or "heteroscedastic": means, then
            log variances on the last axis.
        noise_std: deviation of the targets, for "gaussian".
        seed: makes the call repeatable without touching the global generator.
        chunk: draws held at once; from the working set and `memory` (bytes) by default.
        tolerance: stop a batch early, once the standard error of each mean probability (of each
            mean value in regression) is below it.
        keep: how many draws to keep, for intervals and densities; they cost memory.
        threshold: of |kappa|, for mode="selective".
        kappa: Var w * d^2 log p / dw^2 by layer name; measured on the first batch by default.
        progress: write a line to stderr.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> predict(net, torch.randn(5, 4), samples=8, seed=0)
    Prediction(5 rows, categorical, 8 draws)

    Gal & Ghahramani 2016, "Dropout as a Bayesian approximation", eq. 6; Neklyudov et al. 2019,
    "Variance networks" (mode="selective"); Wang & Manning 2013, "Fast dropout training" (moments).
    """
    options = _Options(
        samples, mode, draw, likelihood, noise_std, seed, chunk, memory, tolerance, keep
    )
    if mode != "mean":
        check_noise(net)
    results: list[Prediction] = []
    ensemble: _Ensemble | None = None
    with seeded(seed), torch.no_grad(), Progress("draws", None, progress) as shown:
        for batch in batches(net, x):
            if ensemble is None:
                ensemble = _ensemble(net, batch, options, threshold, kappa)
            results += ensemble.predict(batch, shown)
    return join(results, ensemble.share if ensemble else None)


def _ensemble(
    net: nn.Module,
    x: Tensor,
    options: _Options,
    threshold: float | None,
    kappa: dict[str, Tensor] | None,
) -> _Ensemble:
    if options.mode != "selective":
        return _Ensemble(net, options)
    selected = select(net, x, threshold, kappa, options.likelihood, options.noise_std)
    return _Ensemble(selected.net, options, selected.share)


class _Ensemble:
    """A net with the options of one call; what can serve several batches is made once."""

    def __init__(self, net: nn.Module, options: _Options, share: float | None = None) -> None:
        self.net, self.options, self.share = net, options, share
        self.noise = options.mode in ("sample", "selective")
        self._sampler: FunctionSampler | None = None

    def predict(self, x: Tensor, shown: Progress) -> Iterator[Prediction]:
        """The predictions of a batch, in as many parts as the memory asks for."""
        if self.options.mode == "moments":
            yield self._by_moments(x)
            return
        found = calls(self.net, x) if self.noise else []
        rows = row_limit(found, self.options.memory) if self.noise else len(x)
        for part in x.split(rows):
            reduction = self.options.reduction()
            outputs = self._sampled(part, found) if self.noise else self._mean(part)
            with closing(outputs):
                for block in outputs:
                    reduction.add(_checked(block, len(part)))
                    shown.advance(len(block))
                    if reduction.settled(self.options.tolerance):
                        break
            yield reduction.result()

    def _mean(self, x: Tensor) -> Generator[Tensor, None, None]:
        with prepared(self.net, noise=False):
            yield _one_tensor(self.net(x)).unsqueeze(0)

    def _sampled(self, x: Tensor, found: list[Call]) -> Generator[Tensor, None, None]:
        samples, links = self.options.samples, chain(self.net)
        chunk = self.options.chunk or chunk_size(found, len(x), samples, self.options.memory)
        if self.options.tolerance is not None and self.options.chunk is None:
            chunk = min(chunk, _SETTLING)
        way = self.options.draw
        if way == "auto":
            way = cheaper(found, len(x), samples, chunk, links is not None)
        if way == "weights":
            return self._functions(x, samples)
        if links is not None:
            return chain_draws(self.net, links, x, _sizes(samples, chunk))
        return local_draws(self.net, x, _sizes(samples, chunk), first_noisy(found))

    def _functions(self, x: Tensor, samples: int) -> Generator[Tensor, None, None]:
        sampler = self._sampler = self._sampler or FunctionSampler(self.net)
        for start in range(0, samples, _BLOCK):
            block = []
            for _ in range(min(_BLOCK, samples - start)):
                sampler.redraw()
                block.append(_one_tensor(sampler(x)))
            yield torch.stack(block)

    def _by_moments(self, x: Tensor) -> Prediction:
        found = propagate(self.net, x)
        reduction = self.options.reduction()
        seed = 0 if self.options.seed is None else self.options.seed
        reduction.add(output_draws(found, self.options.samples, seed))
        located = slice(0, reduction.location.mean.shape[-1])
        return replace(
            reduction.result(),
            mean=found.mean[..., located],
            output_variance=found.variance[..., located],
        )


def _sizes(samples: int, chunk: int) -> list[int]:
    """Chunks of about one size, none larger than asked for."""
    size = -(-samples // -(-samples // chunk))
    return [min(size, samples - start) for start in range(0, samples, size)]


def _one_tensor(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise VardropError(
            f"Expected the net to return one tensor, but got {type(output).__name__}. "
            "Wrap the net in a module that picks the output."
        )
    return output


def _checked(block: Tensor, rows: int) -> Tensor:
    if _one_tensor(block).dim() < 2 or block.shape[1] != rows:
        raise VardropError(
            f"Expected the output to have {rows} rows as the input has, but got shape "
            f"{tuple(block.shape[1:])}."
        )
    return block
