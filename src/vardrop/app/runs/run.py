"""A run: a trained model with its data and its directory, for predictions and reports."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_type
from vardrop._core.errors import NotFiniteError, VardropError
from vardrop._core.files import read_tensors, with_checksum, write_json
from vardrop.app.data import About, Dataset
from vardrop.app.data.inputs import frame_of
from vardrop.app.data.tables import read_table
from vardrop.app.runs.config import Config
from vardrop.app.runs.held_out import CHOICE, Choice
from vardrop.app.runs.models import build_elbo
from vardrop.app.runs.recorder import join_parts
from vardrop.app.store import (
    BEST,
    Record,
    read_history,
    read_progress,
    read_sealed,
    select_prefix,
)
from vardrop.noisy import has_noise
from vardrop.objective import ELBO
from vardrop.prediction import Conformal, Interval, Prediction, predict, predict_batches
from vardrop.prediction.prediction import concatenate
from vardrop.prediction.predictor import Draw
from vardrop.tuning.minimize import find_nonfinite

if TYPE_CHECKING:
    import pandas

    from vardrop.app.data.inputs import Array
    from vardrop.compression import Shrunk

_BATCH = 1000
SAMPLES = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A trained model with everything that a prediction needs, without files and data.

    Args:
        config: the configuration of the run.
        elbo: the model with its likelihood.
        choice: the choices on held-out rows; None if training was interrupted before them.
    """

    config: Config
    elbo: ELBO
    choice: Choice | None

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """The tensors and other values, for `from_state`."""
        columns, config = self.about.preprocessing, self.config.to_json()
        tensors, chosen = ({}, None) if self.choice is None else self.choice.state()
        preprocessing = None if columns is None else columns.to_json()
        values = {"config": config, "preprocessing": preprocessing, "choice": chosen}
        return join_parts({"elbo": self.elbo.state_dict(), "choice": tensors}), values

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], stored: Record, path: Path, net: nn.Module | None
    ) -> Model:
        """The model that `state` described. `net` is a fresh network if the model is custom."""
        config = Config.from_json(stored["config"], stored["preprocessing"], str(path))
        chosen, choice = stored["choice"], None
        if chosen is not None:
            choice = Choice.from_state(select_prefix("choice.", tensors), chosen, str(path))
        model = cls(config, build_elbo(config, select_prefix("elbo.", tensors), path, net), choice)
        if unknown := sorted(tensors.keys() - model.state()[0].keys()):
            text = f"Expected {path} to hold the tensors of its model"
            raise VardropError(f"{text}, but got the unknown {unknown[0]!r}. It is damaged.")
        return model

    @property
    def about(self) -> About:
        """The description of the data that a prediction needs."""
        return self.config.about

    @property
    def net(self) -> nn.Module:
        """The trained model, which is noisy unless the method is none."""
        return self.elbo.net

    def inputs(self, x: Array | str | Path) -> Tensor:
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

    def predict(
        self, x: Array | str | Path, samples: int = SAMPLES, draw: Draw = "estimator"
    ) -> Prediction:
        """The predictive distribution of new rows, in the units of the target.

        Args:
            x: a table with the training columns: a DataFrame, an array with its columns, a CSV or
                Parquet file; or a tensor with inputs of the model.
            samples: draws of the noise. 0 uses the means of the weights.
            draw: "functions" draws one function per sample, so that a row has the same prediction
                in every batch, as in a graph of `export_run`.

        Returns:
            The prediction.
        """
        return concatenate(list(self.predict_batches(self.inputs(x), samples, draw)))

    def predict_batches(
        self, x: Any, samples: int = SAMPLES, draw: Draw = "estimator"
    ) -> Iterator[Prediction]:
        """The predictions of many rows in batches of a thousand, to limit the memory.

        They equal `predict` of all rows up to rounding.

        Args:
            x: a file, tensor, array or DataFrame; or an iterable of batches, each an argument of
                `predict` or a tuple that starts with one.
            samples, draw: as for `predict`.

        Returns:
            An iterator over the predictions of the batches.

        >>> import tempfile, vardrop as vd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = vd.fit("diabetes", "mlp", vd.bayes_by_backprop(), out=folder, epochs=2)
        >>> sum(len(p.mean) for p in run.predict_batches(run.data.test.x.split(16)))
        88
        """
        if (name := find_nonfinite(self.elbo)) is not None:  # classes would be predicted anyway
            text = f"Expected a finite model, but got NaN or infinity in '{name}'."
            raise NotFiniteError(f"{text} Train it again.")
        options = _sampling(self.elbo, samples, self.config.settings.seed, draw)
        if isinstance(x, Tensor | str | Path) or hasattr(x, "__array__") or hasattr(x, "columns"):
            x = (x,)
        parts = (self.inputs(b[0] if isinstance(b, tuple | list) else b) for b in x)
        pieces = enumerate(_split_evenly(parts, _BATCH))
        inputs = (_check_finite(piece, "inputs", number) for number, piece in pieces)
        scale = 1.0 if self.choice is None else math.exp(self.choice.log_scale)
        for number, raw in enumerate(predict_batches(self.elbo, inputs, **options)):
            p = raw if scale == 1 else raw.rescale(scale)
            _check_finite(p.probs if p.classifies else p.mean, "predictions", number)
            yield self.in_units(p)

    def in_units(self, p: Prediction) -> Prediction:
        """Convert a prediction of the scaled target to the units of the target, if it has any."""
        mean, std = self.config.units
        return p.to_units(mean, std, copy.deepcopy(p.likelihood).double().scaled(std))

    def interval(self, p: Prediction, level: float = 0.95) -> Interval:
        """Interval of a prediction of this run that covers a fraction `level` of new rows.

        For regression it is mean +- q std, and q covers this fraction of the held-out rows
        (split-conformal, see `conformal`). With groups the fraction is of rows of new groups, and
        every group counts once, see `Choice.conformal`. A level of 0.95 needs 19 held-out groups.
        For classes, and with too few held-out rows, it is `p.interval(level)`, the interval of the
        draws.

        Args:
            p: a prediction of this run.
            level: the coverage, above 0 and below 1.

        Returns:
            The lower and upper ends.
        """
        if p.classifies or self.choice is None:
            return p.interval(level)
        rule = self.choice.conformal(level)
        return rule.interval(p) if math.isfinite(rule.quantile) else p.interval(level)

    def sets(self, p: Prediction, level: float = 0.95) -> Tensor:
        """Sets of classes that contain the class of a fraction `level` of new rows.

        They are split-conformal, as `interval`. With too few held-out rows or groups, every class
        is inside.

        Args:
            p: a prediction of this run.
            level: the coverage, above 0 and below 1.

        Returns:
            A mask (N, C), True for the classes inside.
        """
        if not p.classifies:
            raise VardropError("`sets` needs classes, but the target is a number. Use `interval`.")
        rule = Conformal(level, math.inf) if self.choice is None else self.choice.conformal(level)
        return rule.classes(p)


@dataclasses.dataclass(frozen=True, eq=False)
class Run(Model):
    """A run that `fit` trained or `load_run` read.

    Args:
        config: the configuration.
        elbo: the objective with the trained model.
        choice: the choice among trials, or None if there were none.
        directory: of the run.
        loaded: the data if they are in memory.

    >>> import tempfile, vardrop as vd
    >>> from vardrop.app.runs import fit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fit("diabetes", "mlp", vd.bayes_by_backprop(), out=folder, epochs=2)
    >>> run.predict(run.data.test.x[:3])
    Prediction(3 examples, Gaussian, 32 draws)
    """

    directory: Path
    loaded: Dataset | None = None

    def __repr__(self) -> str:
        first = list(self.results.get("metrics", {}).items())[:4]  # the most important ones
        scores = ", ".join(f"{k} {'undefined' if v is None else f'{v:.4g}'}" for k, v in first)
        name = f"{str(self.directory)!r}: {self.config.net} on {self.about.name}"
        return f"Run({name}, {scores}) {self.advice}".rstrip()

    @functools.cached_property
    def data(self) -> Dataset:
        """The data, read at the first access."""
        return self.loaded or self.config.load_data(self.directory)

    @property
    def history(self) -> list[Record]:
        """One record per epoch."""
        return read_history(self.directory)

    @property
    def results(self) -> Record:
        """The content of results.json; empty before the end of the training."""
        path = self.directory / "results.json"
        return read_sealed(path) if path.is_file() else {}

    def keep(self, results: Record) -> None:
        """Write results.json.

        Args:
            results: by name.
        """
        write_json(self.directory / "results.json", with_checksum(results))

    def arrays(self) -> dict[str, Tensor]:
        """The stored arrays for the report."""
        path = self.directory / "arrays.safetensors"
        return read_tensors(path)[0] if path.is_file() else {}

    @property
    def standing(self) -> str:
        """The state of an interrupted training; empty for a finished one."""
        progress, settings = read_progress(self.directory), self.config.settings
        if progress is not None:
            epoch, steps, patience = progress["epoch"], progress["position"], settings.patience
            waited = patience is not None and progress["waited"] >= patience
            if progress["phase"] != "fit" or (epoch < (settings.epochs or 0) and not waited):
                model = "last model" if patience is None else "best model"
                warm = " of the KL warm-up" if epoch <= settings.warm else ""
                rest = f" and {steps} step{'s' if steps > 1 else ''}" if steps else ""
                text = f"{self.directory} was stopped after {epoch} of {settings.epochs} epochs"
                return f"{text}{rest}. This is its {model}{warm} so far."
        if self.choice is None or "net" in self.choice.held_out:
            return ""
        text = f"{self.directory} was stopped before the scale of its noise was chosen."
        return f"{text} {resume_text(self.config, self.directory)}"

    @property
    def advice(self) -> str:
        """Advice if the model is not better than a simpler one; empty otherwise."""
        return str(self.results.get("held_out", {}).get("advice", ""))

    def evaluate(self, ood: Sequence[str] = (), samples: int = SAMPLES) -> Record:
        """Score the run on its test data, see `vardrop.app.runs.evaluate`.

        Args:
            ood: image sets for out-of-distribution detection.
            samples: draws of the noise.

        Returns:
            The content of results.json.
        """
        from vardrop.app.runs.evaluate import evaluate

        return evaluate(self, ood, samples)

    def compress(self, **options: Any) -> Shrunk:
        """Remove irrelevant weights or units, see `vardrop.app.runs.compress`.

        Args:
            options: `max_drop`, the largest loss on validation data; `sparsity`, the fraction of
                weights or units to remove instead; `onnx`, a file to write the small model to.

        Returns:
            The small plain model and the plan.
        """
        from vardrop.app.runs.compress import compress

        return compress(self, **options)

    def export(self, path: str | Path, samples: int = SAMPLES, **options: Any) -> int:
        """Write the run as one ONNX file, see `vardrop.app.runs.export_run`.

        Args:
            path: the file.
            samples: functions drawn from the posterior. 0 uses the means of the weights.
            options: `mode` and `outputs`.

        Returns:
            The number of bytes on disk.
        """
        from vardrop.app.runs.run_export import export_run

        return export_run(self, path, samples, **options)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report as one HTML file.

        Args:
            out: the file, report.html in the directory of the run by default.

        Returns:
            The path of the file.
        """
        from vardrop.app.report import report

        return report([self.directory], out)


def _split_evenly(parts: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The same rows in pieces of one size. The last piece may be shorter.

    >>> [len(t) for t in _split_evenly([torch.zeros(5, 1), torch.zeros(1, 1)], 4)]
    [4, 2]
    """
    left: list[Tensor] = []
    for part in parts:
        *pieces, last = torch.cat([*left, part]).split(size)
        yield from pieces
        left = [last]
    yield from left


def _check_finite(rows: Tensor, what: str, batch: int) -> Tensor:
    """Return the rows, or raise an error that names the first row that is not finite."""
    wrong = ~rows.isfinite().flatten(1).all(1)
    if bool(wrong.any()):
        row = batch * _BATCH + int(wrong.int().argmax()) + 1
        why = " Its values are too large for this model." if what == "predictions" else ""
        raise NotFiniteError(f"Expected finite {what}, but got NaN or infinity in row {row}.{why}")
    return rows


def predict_tensor(elbo: ELBO, x: Tensor, samples: int, seed: int) -> Prediction:
    """Predict in batches with the likelihood of an objective. 0 samples use the mean weights."""
    return predict(elbo, x.split(_BATCH), **_sampling(elbo, samples, seed, "estimator"))


def _sampling(elbo: ELBO, samples: int, seed: int, draw: Draw) -> dict[str, Any]:
    """The arguments of `predict`."""
    mode = "mean" if samples == 0 or not has_noise(elbo.net) else "sample"
    return {"samples": max(samples, 1), "mode": mode, "draw": draw, "seed": seed}


def load_run(
    path: str | Path, net: nn.Module | None = None, directory: str | Path | None = None
) -> Run:
    """Read a run with the model of its best epoch. Its data are read at the first access.

    Args:
        path: the directory that `fit` wrote.
        net: a fresh network, if the run has a custom one.
        directory: directory of the image sets, if it has changed.

    Returns:
        The run.
    """
    check_type("path", path, str | os.PathLike, "the directory that fit wrote")
    path = Path(path)
    config = Config.read(path)
    if directory is not None:
        data = dataclasses.replace(config.data, directory=str(directory))
        config = dataclasses.replace(config, data=data)
    if not (path / BEST).is_file():
        progress, when = read_progress(path), "before its first checkpoint"
        if progress is not None and progress["phase"] == "pretrain":
            when = "during the pretraining of the plain model"
        elif not (path / CHOICE).is_file():
            when = "during the trials on held-out rows"
        text = f"{path} has no trained model yet, because it was stopped {when}."
        raise VardropError(f"{text} {resume_text(config, path)}")
    elbo = build_elbo(config, read_tensors(path / BEST)[0], path / BEST, net)
    run = Run(config, elbo, Choice.read(path), path)
    if run.choice is None and not run.standing:
        text = f"File not found: {path / CHOICE}, which holds the scale of the noise."
        raise VardropError(f"{text} {resume_text(config, path)}")
    return run


def resume_text(config: Config, path: Path) -> str:
    """A sentence with the command, or the call, that resumes a run."""
    custom = {"net=net": config.own_net, "data=data": config.data.in_memory}
    arguments = [repr(str(path)), *(text for text, needed in custom.items() if needed)]
    if not any(custom.values()):
        return f"Resume it with `vardrop fit --resume --out {shlex.quote(str(path))}`."
    return f"Resume it with `vardrop.resume({', '.join(arguments)})`."
