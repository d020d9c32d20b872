"""`Predictor`: a model, its likelihood and a way to draw, called on inputs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vardrop._core.calls import (
    Batch,
    BatchOrLoader,
    Pick,
    device_of,
    input_batches,
    map_tensors,
    num_examples,
    output_tensor,
    split_batch,
)
from vardrop._core.checks import check_choice, check_integer, check_number, check_type
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.modules import clone_modules
from vardrop._core.progress import ProgressLine
from vardrop._core.sharding import is_model_sharded
from vardrop.functional import GeneratorNoise, draw_from, restore_state_on_error
from vardrop.functional.random import resolve_seed
from vardrop.gates import Gate, find_unswitched_dropout, switched_class
from vardrop.layers import Variational
from vardrop.likelihoods import Likelihood, Objective, resolve_likelihood
from vardrop.noisy import named_modules_of
from vardrop.prediction.conformal import Conformal
from vardrop.prediction.eval_copy import (
    check_noise,
    copy_tensors,
    draws_functions,
    has_untracked_randomness,
    is_stochastic,
)
from vardrop.prediction.functions import draws
from vardrop.prediction.graph import Graph, GraphInput, NoiseInput
from vardrop.prediction.moments import MomentDraws, Moments
from vardrop.prediction.prediction import Prediction, Summary, concatenate
from vardrop.prediction.rows import NotRowwiseError, RowDraws
from vardrop.prediction.strategies import (
    DrawStrategy,
    FunctionDraws,
    LoopDraws,
    MemberDraws,
    ShardedDraws,
)

Mode = Literal["sample", "mean", "moments"]
Draw = Literal["estimator", "local", "functions"]
_MOST_DRAWS = 256  # in a block of outputs
_SETTLING = 32  # draws between two checks of the tolerance
_CLASS_OUTPUTS = ("probs", "aleatoric", "epistemic", "entropy", "lower", "upper")
_VALUE_OUTPUTS = ("mean", "aleatoric", "epistemic", "std", "lower", "upper")
_SET = "set"


class Predictor(nn.Module):
    """The predictive distribution of a model, for repeated calls: p(y | x) = E_w p(y | x, w).

    Whatever does not depend on the input is computed at the first call and kept: a copy of the
    tensors, the variances of weights, the trace of the model, and drawn functions if they fit into
    `memory`. Later changes of the model have no effect until `refresh()` is called.
    `vardrop.predict` makes a predictor for one call. `vardrop.freeze` returns one that owns its
    copy of the model.

    Args:
        net: as for `vardrop.predict`.
        samples: number of draws.
        mode, draw, likelihood, memory, tolerance, keep, output, batched: as for `vardrop.predict`.
        conformal: a rule of `vardrop.conformal`, fitted on predictions of the same mode. It then
            gives the interval, or sets of classes.
        level: of the interval without such a rule.
        units: mean and standard deviation of the target before it was standardized. Predictions are
            then in the units of the target.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> predictor = vd.Predictor(net, samples=8)
    >>> predictor(torch.randn(5, 4), seed=0)
    Prediction(5 examples, Categorical, 8 draws)
    """

    net: nn.Module
    source: Any  # what the user passed
    pick: Pick
    checks_net = True  # an ensemble leaves the checks to its members
    is_kept = True  # False in a predictor for one call
    _model: nn.Module

    def __init__(
        self,
        net: nn.Module | Objective,
        samples: int = 32,
        *,
        mode: Mode = "sample",
        draw: Draw = "estimator",
        likelihood: Likelihood | None = None,
        conformal: Conformal | None = None,
        level: float = 0.95,
        units: tuple[float, float] | None = None,
        memory: int = 2**28,
        tolerance: float | None = None,
        keep: int | None = None,
        output: Pick | None = None,
        batched: bool = True,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, ("sample", "mean", "moments"))
        check_choice("draw", draw, ("estimator", "local", "functions"))
        check_integer("samples", samples)
        check_integer("memory", memory)
        check_number("level", level, above=0, below=1)
        if output is not None:
            check_type("output", output, Callable, "a function")  # type: ignore[arg-type]
        if keep is not None:
            check_integer("keep", keep, at_least=0)
        if tolerance is not None:
            check_number("tolerance", tolerance, above=0)
        if conformal is not None:
            check_type("conformal", conformal, Conformal, "a rule of vardrop.conformal")
            conformal.check_mode(mode == "moments")
        model, meaning = resolve_likelihood(net, likelihood)
        if mode == "sample" and model is not net and not any(map(is_stochastic, model.modules())):
            mode = "mean"  # an objective with a plain model
        pick = getattr(net, "output", None) if output is None else output
        # The user's model is no submodule: moving or copying the predictor leaves it alone.
        self.__dict__.update(net=model, source=net, pick=pick or output_tensor)
        self.likelihood = meaning.frozen_copy()
        self.samples, self.mode, self.draw, self.memory = samples, mode, draw, memory
        self.conformal, self.level, self.units = conformal, level, units
        self.tolerance, self.keep, self.batched = tolerance, keep, batched
        if meaning.class_axis is not None:
            self.units = None
        elif units is not None:
            self.unit_likelihood = copy.deepcopy(self.likelihood).double().scaled(units[1])
        self.refresh()
        super().train(False)

    def refresh(self) -> None:
        """Compute everything again at the next call, after the model has changed."""
        self.__dict__.pop("_model", None)
        if self.checks_net and self.mode != "mean":
            check_noise(self.net)
        self._lock = threading.Lock()
        self._strategy: DrawStrategy | None = None  # made at the first call
        self._fallback: DrawStrategy | None = None  # for inputs that the strategy cannot run

    def replace_net(self, net: nn.Module) -> None:
        """Predict with a model that belongs to this predictor and moves with it.

        Args:
            net: the model.
        """
        del self.__dict__["net"]
        self.__dict__["source"] = net
        self.net = net
        self.refresh()

    def train(self, mode: bool = True) -> Predictor:
        """Do nothing: a predictor stays in evaluation mode."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Predictor:
        self.refresh()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        caches = ("_lock", "_strategy", "_fallback", "_model")
        return {name: state for name, state in self.__dict__.items() if name not in caches}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.refresh()

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, samples={self.samples}, draw={self.draw!r}"

    def forward(
        self, x: BatchOrLoader, seed: int | None = None, progress: bool | None = False
    ) -> Prediction:
        """The predictive distribution of a batch, or of all batches of a loader.

        Args:
            x, seed, progress: as for `vardrop.predict`.

        Returns:
            The prediction of all examples.
        """
        return concatenate(list(self.batches(x, seed, progress)))

    def batches(
        self, x: BatchOrLoader, seed: int | None = None, progress: bool | None = False
    ) -> Iterator[Prediction]:
        """The predictive distributions of the batches of a loader, one after the other.

        Args:
            x, seed, progress: as for `vardrop.predict`.

        Returns:
            An iterator of predictions, one per batch.
        """
        custom = self.mode == "mean" and has_untracked_randomness(self.net)
        is_random = self.mode == "sample" or custom  # if not, leave the global generator alone
        noise = draw_from(GeneratorNoise(resolve_seed(seed) if is_random else seed or 0))
        device, total = device_of(self.net), None
        inputs: Iterable[Any]
        if self.batched:
            total = num_examples(x) if isinstance(x, Tensor | Mapping) else None
            inputs = input_batches(device, x)
        else:
            one: Any = x
            inputs = [map_tensors(lambda t: t.to(device or t.device), one)]
        with ProgressLine("predict", total, progress) as line:
            for batch in inputs:
                yield self._predict_batch(batch, seed, noise, line)

    @report_arguments("x")
    @restore_state_on_error
    def _predict_batch(
        self, x: Batch, seed: int | None, noise: draw_from, line: ProgressLine
    ) -> Prediction:
        with noise, torch.no_grad():
            strategy = self.strategy_for(x, seed)
            parts: Iterable[Batch] = (x,)
            if self.batched and (size := strategy.max_examples(x, self.samples)) < num_examples(x):
                parts = split_batch(x, size)
            predictions = []
            for part in parts:
                count = num_examples(part) if self.batched else None
                if isinstance(strategy, MomentDraws):
                    output = strategy.propagate(part)
                    p = self.reduce([strategy.draw_output(output, self.samples)], count, output)
                else:
                    p = self.reduce(strategy.draws(part, self.samples), count)
                if self.units is not None:
                    p = p.to_units(*self.units, self.unit_likelihood)
                predictions.append(p)
                line.advance(len(p.mean))
        return predictions[0] if len(predictions) == 1 else concatenate(predictions)

    def reduce(
        self, blocks: Iterable[Tensor], count: int | None = None, output: Moments | None = None
    ) -> Prediction:
        """The prediction of standardized targets from blocks of draws (S, N, ...).

        It stops as soon as there are enough draws. With the `output` of moment propagation, the
        prediction has its mean and variance instead of the sample moments of the draws.

        Args:
            blocks: outputs of the draws.
            count: the number of examples, or None if the input is not split into examples.
            output: mean and variance of the output, by moment propagation.

        Returns:
            The prediction.
        """
        keep = self.samples if self.keep is None else min(self.keep, self.samples)
        summary = Summary(self.likelihood, keep)
        for block in blocks:
            if block.dim() < 2 or (count is not None and block.shape[1] != count):
                raise VardropError(
                    f"Expected the output to have {count} rows as the input has, but got shape "
                    f"{tuple(block.shape[1:])}."
                )
            self.likelihood.check_outcomes(block.shape[1:])
            summary.add(block)
            if self.tolerance is not None and summary.is_settled(self.tolerance):
                break
        p = summary.prediction()
        if output is not None:
            mean, variance = map(self.likelihood.locations, output)
            p = replace(p, mean=mean, output_variance=variance, analytic=True)
        return p

    def strategy_for(self, x: Batch, seed: int | None = None) -> DrawStrategy:
        """How inputs like x are drawn, with a seed of the user or without.

        Args:
            x: a batch.
            seed: of the user, or None.

        Returns:
            The strategy.
        """
        with self._lock:
            if self._strategy is None:
                self.__dict__["_model"] = self._copy_model(x)
                self._strategy = self._make_strategy()
            strategy = self._strategy
            if isinstance(strategy, FunctionDraws) and seed is None and self.is_kept:
                weights = sum(p.numel() * p.element_size() for p in self.net.parameters())
                if self.samples * weights <= self.memory:
                    self._fallback = self._fallback or MemberDraws(
                        list(draws(self._model, self.samples)), self.pick
                    )
                    return self._fallback
            if isinstance(strategy, RowDraws):
                try:
                    strategy.plan(x)
                except NotRowwiseError as error:
                    self._fallback = self._fallback or LoopDraws(
                        self._model, self.pick, str(error), local=self.draw == "local"
                    )
                    return self._fallback
            return strategy

    def _copy_model(self, x: Batch) -> nn.Module:
        """The model to draw from, which in a predictor that is kept has its own tensors."""
        net = self.net
        if is_model_sharded(net):
            return net
        # Custom modules that draw dropout in training mode only: it is switched in the copy.
        search = self.checks_net and self.mode != "mean"
        switched = find_unswitched_dropout(net, x) if search else []
        if self.is_kept and "net" not in self._modules:
            net = copy_tensors(net)
        elif switched:
            net = clone_modules(net)
        for module in map(net.get_submodule, switched):
            module.__class__ = switched_class(type(module))  # type: ignore[assignment]
        return net

    def _make_strategy(self) -> DrawStrategy:
        model, pick, local = self._model, self.pick, self.draw == "local"
        if is_model_sharded(model):
            if self.mode == "moments" or self.draw != "estimator":
                raise VardropError(
                    "Expected mode='sample' or 'mean' with draw='estimator' for a model whose "
                    f"tensors are sharded over processes, but got mode={self.mode!r} with "
                    f"draw={self.draw!r}."
                )
            return ShardedDraws(self.source, model, pick, self.mode == "sample")
        if self.mode == "moments":
            return MomentDraws(model, pick, self.memory)
        if self.mode == "mean":
            return LoopDraws(model, pick, "", noise=False)
        if self.draw == "functions" or (not local and draws_functions(model)):
            return FunctionDraws(model, pick)
        if not self.batched:
            return LoopDraws(model, pick, "its input is not split into examples", local=local)
        most = _MOST_DRAWS if self.tolerance is None else _SETTLING
        return RowDraws(model, pick, self.memory, local, most)

    def plan(self, x: BatchOrLoader) -> str:
        """How inputs like x are run: what is shared by the draws, or why nothing is.

        Args:
            x: a batch or a loader of batches.

        Returns:
            The description.
        """
        (batch,) = input_batches(device_of(self.net), x)
        return self.strategy_for(batch).describe(batch)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of `outputs`, in their order."""
        if self.likelihood.class_axis is None:
            return _VALUE_OUTPUTS
        return _CLASS_OUTPUTS if self.conformal is None else (*_CLASS_OUTPUTS, _SET)

    def outputs(self, x: BatchOrLoader, seed: int | None = None) -> tuple[Tensor, ...]:
        """The prediction as a tuple of tensors with the names `output_names`.

        The names are `probs` or `mean`, `aleatoric` and `epistemic` (nats for classes, variances
        for values), the total as `entropy` or as the standard deviation `std`, `lower` and `upper`
        of the interval, and `set`, True for the classes of a conformal set.

        Args:
            x: a batch or a loader of batches.
            seed: for repeatable draws.

        Returns:
            The tensors.
        """
        return self.select_outputs(self(x, seed), self.output_names)

    def select_outputs(self, p: Prediction, names: Sequence[str]) -> tuple[Tensor, ...]:
        """Tensors of a prediction, by name.

        Args:
            p: a prediction.
            names: of the tensors, see `outputs`.

        Returns:
            The tensors in the order of the names.
        """
        tensors: dict[str, Tensor] = {}
        if {"lower", "upper"} & set(names):
            if self.conformal is not None and not p.classifies:
                tensors["lower"], tensors["upper"] = self.conformal.interval(p)
            else:
                tensors["lower"], tensors["upper"] = p.interval(self.level)
        if _SET in names:
            assert self.conformal is not None
            tensors[_SET] = self.conformal.classes(p)
        return tuple(tensors[n] if n in tensors else getattr(p, n) for n in names)

    def graph(
        self, x: GraphInput, outputs: Sequence[str] | None = None, noise: NoiseInput = "runtime"
    ) -> Graph:
        """The predictor as a module from tensors to tensors, for an exporter.

        Args:
            x: an example input.
            outputs: which of `output_names`, in this order, or `draws` for the outputs of all
                draws; all of `output_names` by default.
            noise: "runtime" draws the noise of sampled predictions inside the graph. "input" takes
                it as a last argument, standard normal numbers (samples, N, F), so that predictions
                are repeatable.

        Returns:
            The module.
        """
        names = self.output_names if outputs is None else tuple(outputs)
        for name in names:
            check_choice("outputs", name, (*self.output_names, "draws"))
        check_choice("noise", noise, ("runtime", "input"))
        with torch.no_grad():
            strategy = self.strategy_for(x)
            if isinstance(self._strategy, FunctionDraws) and self.draw == "estimator":
                reason = "its layers draw whole weights"  # a graph draws them as in training
                strategy = LoopDraws(self._model, self.pick, reason)
            return Graph(self, strategy, x, names, noise == "input")

    def metadata(self) -> dict[str, str]:
        """A description of this predictor for the file it is exported to."""
        layers = named_modules_of(self.net, Variational).values()
        noise = [repr(m.posterior) for m in layers if m.posterior is not None]
        noise += [repr(m.noise) for m in named_modules_of(self.net, Gate).values()]
        entries = {
            "vardrop": version("vardrop"),
            "mode": self.mode,
            "samples": str(self.samples),
            "draw": self.draw,
            "noise": "; ".join(dict.fromkeys(noise)),
            "likelihood": repr(self.likelihood),
            "level": str(self.level if self.conformal is None else self.conformal.level),
        }
        return entries if self.conformal is None else {**entries, "conformal": repr(self.conformal)}
