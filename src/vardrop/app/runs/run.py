"""A run: a trained model with its data and its directory, for predictions and reports."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_number, check_type
from vardrop._core.errors import VardropError
from vardrop._core.files import read_tensors, with_checksum, write_json
from vardrop._core.rng import preserve_rng
from vardrop.app.data import About, Dataset
from vardrop.app.data.inputs import frame_of
from vardrop.app.data.tables import read_table
from vardrop.app.runs.checkpoint import load_module, select_prefix
from vardrop.app.runs.config import Config
from vardrop.app.runs.held_out import CHOICE, Choice
from vardrop.app.runs.models import build_net
from vardrop.app.store import BEST, read_history, read_sealed, read_standing
from vardrop.conversion import convert
from vardrop.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from vardrop.noisy import has_noise
from vardrop.objective import ELBO
from vardrop.prediction import Conformal, Interval, Prediction, predict, predict_batches
from vardrop.prediction.prediction import concatenate
from vardrop.prediction.predictor import Draw
from vardrop.tuning import NotFiniteError
from vardrop.tuning.minimize import find_nonfinite

if TYPE_CHECKING:
    import pandas

_BATCH = 1000
SAMPLES = 32


def likelihood_for(config: Config) -> Likelihood:
    """Classes; or one value, with a deviation that is learned for all rows or row by row."""
    if config.about.task == "classification":
        return Categorical()
    return HeteroscedasticGaussian() if config.settings.heteroscedastic else Gaussian(learned=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A trained model with everything that a prediction needs, without files and data.

    Args:
        config: what was trained.
        elbo: the net with its likelihood.
        choice: the choices of held-out rows; None if training stopped before them.
    """

    config: Config
    elbo: ELBO
    choice: Choice | None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors and plain values, of which `from_state` makes it again."""
        columns, choice = self.about.preprocessing, self.choice
        tensors, chosen = ({}, None) if choice is None else choice.state()
        parts = {"elbo": self.elbo.state_dict(), "choice": tensors}
        values = {
            "config": self.config.to_json(),
            "preprocessing": None if columns is None else columns.to_json(),
            "choice": chosen,
        }
        return {f"{k}.{n}": t for k, part in parts.items() for n, t in part.items()}, values

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], values: dict[str, Any], path: Path, net: nn.Module | None
    ) -> Model:
        """The model that `state` described; `net` is fresh if a custom one was trained."""
        config = Config.from_json(values["config"], values["preprocessing"], str(path))
        chosen, choice = values["choice"], None
        if chosen is not None:
            choice = Choice.from_state(select_prefix("choice", tensors), chosen, str(path))
        return cls(config, build_elbo(config, select_prefix("elbo", tensors), path, net), choice)

    @property
    def about(self) -> About:
        """The description of the data that a prediction needs."""
        return self.config.about

    @property
    def net(self) -> nn.Module:
        """The trained net; noisy, unless the method is none."""
        return self.elbo.net

    def inputs(self, x: Any) -> Tensor:
        """Inputs of the model: a tensor unchanged, or from a DataFrame, an array or a file."""
        if isinstance(x, Tensor):
            return x
        preprocessing = self.about.preprocessing
        if preprocessing is None:
            shape = f"(N, {', '.join(map(str, self.about.shape))})"
            raise VardropError(f"Expected a tensor of images of shape {shape}, but got a table.")
        if isinstance(x, str | Path):
            return preprocessing.inputs(self.read_file(x), str(x))
        names = [column.name for column in preprocessing.columns]
        return preprocessing.inputs(frame_of(x, names), "the table")

    def read_file(self, path: str | Path) -> pandas.DataFrame:
        """The rows of a file, read with the options of the training data."""
        preprocessing = self.about.preprocessing
        assert preprocessing is not None
        return read_table(path, self.config.data, preprocessing.text_columns)

    def predict(self, x: Any, samples: int = SAMPLES, draw: Draw = "estimator") -> Prediction:
        """The predictive distribution of new rows, in the units of the target.

        Args:
            x: a table with the training columns: a DataFrame, an array with its columns, a CSV or
                Parquet file; or a tensor with inputs of the net.
            samples: draws of the noise; 0 takes the means of the weights.
            draw: "weights" draws whole functions, so that a row has the same prediction in every
                batch, as in a graph of `export_run`.
        """
        return concatenate(list(self.predict_batches(self.inputs(x), samples, draw)))

    def predict_batches(
        self, x: Any, samples: int = SAMPLES, draw: Draw = "estimator"
    ) -> Iterator[Prediction]:
        """The predictions of many rows, a thousand at a time: memory holds no more of them.

        They equal `predict` of all rows up to rounding.

        Args:
            x: a file, which is read piece by piece; a loader of batches, each of them what
                `predict` takes, or a tuple that begins with it; a tensor, array or DataFrame.
            samples, draw: as for `predict`.

        >>> import tempfile, vardrop as vd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = vd.fit("diabetes", "mlp", vd.bayes_by_backprop(), out=folder, epochs=2)
        >>> sum(len(p.mean) for p in run.predict_batches(run.data.test.x.split(16)))
        88
        """
        if (name := find_nonfinite(self.elbo)) is not None:  # it would give a class all the same
            text = f"Expected the net to be finite, but got NaN or infinity in '{name}'."
            raise NotFiniteError(f"{text} Train it again.")
        way = _way(self.elbo, samples, self.config.settings.seed, draw)
        if isinstance(x, Tensor | str | Path) or hasattr(x, "__array__") or hasattr(x, "columns"):
            x = (x,)
        parts = (self.inputs(b[0] if isinstance(b, tuple | list) else b) for b in x)
        pieces = enumerate(_split_evenly(parts, _BATCH))
        inputs = (_check_finite(piece, "inputs", number) for number, piece in pieces)
        scale = 1.0 if self.choice is None else math.exp(self.choice.log_scale)
        for number, raw in enumerate(predict_batches(self.elbo, inputs, **way)):
            p = raw if scale == 1 else raw.rescale(scale)
            _check_finite(p.probs if p.classifies else p.mean, "predictions", number)
            yield self.in_units(p)

    def in_units(self, p: Prediction) -> Prediction:
        """A prediction of standardized targets in the units of the target."""
        if p.classifies or self.about.preprocessing is None:
            return p
        mean, std = self.config.units
        likelihood = copy.deepcopy(p.likelihood).double().scaled(std)
        return p.to_units(mean, std, likelihood)

    def interval(self, p: Prediction, level: float = 0.95) -> Interval:
        """Interval of a prediction of this run that covers a fraction `level` of new rows.

        Regression: mean +- q std, with q the bound that covers that fraction of the held-out rows
        (split-conformal, see `conformal`). With groups the fraction is of rows of new groups:
        every group counts once, see `Choice.conformal`, and 19 of them have to be held out for a
        level of 0.95. For classes, and if too few rows were held out, it is the interval of the
        draws, `p.interval(level)`.
        """
        if p.classifies or self.choice is None:
            return p.interval(level)
        check_number("level", level, above=0, below=1)
        rule = self.choice.conformal(level)
        return rule.interval(p) if math.isfinite(rule.quantile) else p.interval(level)

    def sets(self, p: Prediction, level: float = 0.95) -> Tensor:
        """Sets of classes (N, C), True inside, that hold the class of a fraction `level` of rows.

        Split-conformal by the held-out rows or groups, as `interval`. If too few were held out,
        every class is inside.
        """
        check_number("level", level, above=0, below=1)
        if not p.classifies:
            raise VardropError("Expected classes for `sets`, but got numbers. Use `interval`.")
        rule = Conformal(level, math.inf) if self.choice is None else self.choice.conformal(level)
        return rule.classes(p)


@dataclasses.dataclass(frozen=True, eq=False)
class Run(Model):
    """A run that `fit` trained or `load_run` read.

    >>> import tempfile, vardrop as vd
    >>> from vardrop.app.runs import fit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fit("diabetes", "mlp", vd.bayes_by_backprop(), out=folder, epochs=2)
    >>> run.predict(run.data.test.x[:3])
    Prediction(3 rows, Gaussian, 32 draws)
    """

    directory: Path
    loaded: Dataset | None = None

    def __repr__(self) -> str:
        first = list(self.results.get("metrics", {}).items())[:4]  # those to be read first
        scores = ", ".join(f"{k} {'undefined' if v is None else f'{v:.4g}'}" for k, v in first)
        name = f"{self.config.net} on {self.about.name}"
        return f"Run({str(self.directory)!r}: {name}, {scores}) {self.advice}".rstrip()

    @functools.cached_property
    def data(self) -> Dataset:
        """The data, read at the first access."""
        return self.loaded or load_same_data(self.config, self.directory)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch."""
        return read_history(self.directory)

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json; empty before the end of the training."""
        path = self.directory / "results.json"
        return read_sealed(path) if path.is_file() else {}

    def keep(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        write_json(self.directory / "results.json", with_checksum(results))

    def arrays(self) -> dict[str, Tensor]:
        """The arrays that the report draws, as far as they were measured."""
        path = self.directory / "arrays.safetensors"
        return read_tensors(path)[0] if path.is_file() else {}

    @property
    def standing(self) -> str:
        """Where an interrupted training stopped; empty for a finished one."""
        values, settings = read_standing(self.directory), self.config.settings
        tired = values and settings.patience is not None and values["waited"] >= settings.patience
        ended = values and (tired or values["epoch"] >= (settings.epochs or 0))
        if values is not None and not (ended and values["phase"] == "fit"):
            which = "last" if settings.patience is None else "best"
            warm = " of the KL warm-up" if values["epoch"] <= settings.warm else ""
            done = values["position"]
            steps = f" and {done} step{'s' if done > 1 else ''}" if done else ""
            return (
                f"{self.directory} was stopped after {values['epoch']} of {settings.epochs} epochs"
                f"{steps}; this is its {which} net{warm} so far."
            )
        if self.choice is None or "net" in self.choice.held_out:
            return ""
        return (
            f"{self.directory} was stopped before held-out rows gave its noise a scale; "
            f"{resume_text(self.config, self.directory)}"
        )

    @property
    def advice(self) -> str:
        """What to try if the model is no better than a simpler one; empty otherwise."""
        return str(self.results.get("held_out", {}).get("advice", ""))

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report, one HTML file; its path."""
        from vardrop.app.report import report

        return report([self.directory], out)


def _split_evenly(parts: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The same rows in pieces of one size, the last of them shorter.

    >>> [len(t) for t in _split_evenly([torch.zeros(5, 1), torch.zeros(1, 1)], 4)]
    [4, 2]
    """
    left: list[Tensor] = []
    for part in parts:
        *pieces, last = torch.cat([*left, part]).split(size)
        yield from pieces
        left = [last]
    yield from left


def _check_finite(values: Tensor, what: str, batch: int) -> Tensor:
    """Name the first row with a value that is not finite, counted from 1."""
    wrong = ~values.isfinite().flatten(1).all(1)
    if bool(wrong.any()):
        row = batch * _BATCH + int(wrong.int().argmax()) + 1
        why = " Its values are too large for this net." if what == "predictions" else ""
        raise NotFiniteError(f"Expected finite {what}, but got NaN or infinity in row {row}.{why}")
    return values


def predict_tensor(
    elbo: ELBO, x: Tensor, samples: int, seed: int, draw: Draw = "estimator"
) -> Prediction:
    """Predict in batches with the likelihood of an objective; 0 samples take the mean weights."""
    return predict(elbo, x.split(_BATCH), **_way(elbo, samples, seed, draw))


def _way(elbo: ELBO, samples: int, seed: int, draw: Draw) -> dict[str, Any]:
    mode = "mean" if samples == 0 or not has_noise(elbo.net) else "sample"
    return {"samples": max(samples, 1), "mode": mode, "draw": draw, "seed": seed}


def load_same_data(
    config: Config, path: Path, handed: Any = None, validation: Any = None, test: Any = None
) -> Dataset:
    """The data of a run, or data passed for it, if they are what it was trained on."""
    seed, source = config.settings.seed, config.data
    data = source.load(seed) if handed is None else source.read(handed, validation, test, seed)
    for name in ("checksum", "kind", "task", "shape", "classes", "sizes", "rows"):
        now, then = getattr(data, name), getattr(config.about, name)
        if now != then:
            raise VardropError(
                f"Expected {data.name} to be the data that {path} was trained on, but the {name} "
                f"of the data changed from {then} to {now}. Begin a new run."
            )
    return data


def load_run(
    path: str | Path, net: nn.Module | None = None, directory: str | Path | None = None
) -> Run:
    """Read a run with the model of its best epoch; its data are read only if they are needed.

    Args:
        path: the directory that `fit` wrote.
        net: a fresh network, if `fit` was given a custom one.
        directory: of the image sets, if they have moved.
    """
    check_type("path", path, str | os.PathLike, "the directory that fit wrote")
    path = Path(path)
    config = Config.read(path)
    if directory is not None:
        data = dataclasses.replace(config.data, directory=str(directory))
        config = dataclasses.replace(config, data=data)
    _check_begun(config, path)
    elbo = build_elbo(config, read_tensors(path / BEST)[0], path / BEST, net)
    run = Run(config, elbo, Choice.read(path), path)
    if run.choice is None and not run.standing:
        raise VardropError(
            f"Expected the file {path / CHOICE}, but it is not there: the noise of this net would "
            f"have another scale. Put it back, or {resume_text(config, path)}"
        )
    return run


def build_elbo(
    config: Config, tensors: dict[str, Tensor], source: Path, net: nn.Module | None = None
) -> ELBO:
    """The trained net of a configuration, from tensors that were read from `source`.

    A net by name is made only if it is not larger than what was read.
    """
    if not config.own_net:
        _check_size(config, sum(t.numel() for t in tensors.values()), source)
    model = fresh_net(config, net)
    with preserve_rng():  # what is drawn here is replaced by what was trained
        if config.method is not None:
            convert(model, config.method, config.where, config.exclude)
        rows = config.about.sizes["train"]
        elbo = ELBO(model, likelihood_for(config), rows, float(has_noise(model)))
    load_module(elbo, tensors, source)
    return elbo


def _check_size(config: Config, stored: int, source: Path) -> None:
    try:
        with torch.device("meta"):
            plain = build_net(config.net, config.about.shape, config.outputs)
        wanted = sum(p.numel() for p in plain.parameters())
    except (RuntimeError, TypeError, OverflowError) as wrong:  # as many as no memory has
        raise VardropError(f"Expected {source} to hold a net, but got: {wrong}.") from wrong
    if wanted > stored:
        numbers = f"the {wanted} numbers of the net {config.net}, but got {stored}"
        raise VardropError(f"Expected {source} to hold {numbers}. It is damaged.")


def fresh_net(config: Config, net: nn.Module | None = None) -> nn.Module:
    """The network before training: a custom one, or one by name and seed."""
    if not config.own_net:
        about = config.about
        with preserve_rng(seed=config.settings.seed):
            return build_net(config.net, about.shape, config.outputs, about.embeddings)
    if net is None:
        text = f"Expected `net`, because the run has a custom net ({config.net}), but got none."
        raise VardropError(f"{text} Pass a fresh one.")
    return net


def resume_text(config: Config, path: Path) -> str:
    """The command, or the call, that resumes a run."""
    custom = {"net": config.own_net, "data": config.data.given}
    arguments = [name for name, needs_passing in custom.items() if needs_passing]
    if not arguments:
        return f"resume it with `vardrop fit --resume --out {shlex.quote(str(path))}`."
    typed = ", ".join(f"{name}={name}" for name in arguments)
    return f"resume it with `vardrop.resume({str(path)!r}, {typed})`."


def _check_begun(config: Config, path: Path) -> None:
    """Raise an error for a run without a trained model, with the command that resumes it."""
    if (path / BEST).is_file():
        return
    standing = read_standing(path)
    if standing is not None and standing["phase"] == "pretrain":
        where = "while it trained the plain net that it begins with"
    elif not (path / CHOICE).is_file():
        where = "while it trained nets on held-out rows, to choose and to compare"
    else:
        where = "before its first checkpoint"
    text = f"Expected a trained net in {path}, but it was stopped {where}."
    raise VardropError(f"{text} To have one, {resume_text(config, path)}")
