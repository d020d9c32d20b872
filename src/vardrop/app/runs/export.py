"""A run as one ONNX file that answers raw rows in the units of the target, with its doubt."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from vardrop._core.checks import check_choice, check_integer
from vardrop._core.errors import VardropError, needed
from vardrop._core.files import write_atomically
from vardrop.app.data.onnx_graph import with_preprocessing
from vardrop.app.runs.config import check_output
from vardrop.app.runs.run import SAMPLES, Run
from vardrop.export import export_onnx
from vardrop.functional import GeneratorNoise, draw_from, restore_state_on_error
from vardrop.likelihoods import Likelihood, entropy
from vardrop.noisy import has_noise
from vardrop.prediction import Conformal, draws, freeze

LEVEL = 0.95
_ON_REQUEST = {"classification": ("lower", "upper", "set")}


class Answer(nn.Module):
    """Functions drawn from a run's net, and what they say together: the parts of a `Prediction`.

    Classes: `probs` (N, C), `entropy`, `aleatoric` and `epistemic` (N,). Numbers, (N, 1): `mean`,
    `std`, `lower` and `upper` of the 95 % interval, the variances `aleatoric` and `epistemic`.

    Args:
        nets: the functions: nets that differ in their numbers alone.
        likelihood: what an output means.
        rule: the conformal rule that gives the interval, if there is one.
    """

    shift: Tensor
    unit: Tensor

    def __init__(
        self, nets: list[nn.Module], likelihood: Likelihood, rule: Conformal | None
    ) -> None:
        super().__init__()
        parameters, buffers = stack_module_state(nets)
        stacked = {n: t.detach() for n, t in (*parameters.items(), *buffers.items())}
        self.keys, self.count = tuple(stacked), len(nets)
        self.numbers = nn.ParameterList(stacked.values()).requires_grad_(False)
        self._net = (nets[0],)  # no part of this module, whose numbers it is called with
        self.likelihood, self.together = likelihood, len(nets) > 1
        normal = math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)))
        self.width = normal if rule is None else rule.quantile

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        if self.likelihood.class_axis is not None:
            return "probs", "entropy", "aleatoric", "epistemic"
        return "mean", "std", "lower", "upper", "aleatoric", "epistemic"

    def _draw(self, x: Tensor, *numbers: Tensor) -> Tensor:
        tensors = dict(zip(self.keys, numbers, strict=True))
        output: Tensor = functional_call(self._net[0], tensors, x)
        return output

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs for rows as the net takes them."""
        if self.together:
            outputs = torch.vmap(partial(self._draw, x))(*self.numbers)
        else:
            each = ([t[k] for t in self.numbers] for k in range(self.count))
            outputs = torch.stack([self._draw(x, *numbers) for numbers in each])
        parts = self.likelihood.parts(outputs)
        aleatoric = parts.aleatoric.mean(0)
        if parts.probs is not None:
            probs = parts.probs.mean(0)
            total = entropy(probs.clamp(min=torch.finfo(probs.dtype).tiny).log(), probs, 1)
            return probs, total, aleatoric, (total - aleatoric).clamp(min=0)
        mean = parts.location.mean(0)
        epistemic = (parts.location - mean).square().sum(0) / max(self.count - 1, 1)
        std = (aleatoric + epistemic).sqrt()
        half = self.width * std
        return mean, std, mean - half, mean + half, aleatoric, epistemic


class InUnits(nn.Module):
    """Outputs of an `Answer`, or of the graph of a frozen predictor, in the units of the target.

    Those of numbers are in double precision, see `Model.in_units`.
    """

    shift: Tensor
    unit: Tensor

    def __init__(self, inner: Any, run: Run, count: int, outputs: Sequence[str] | None) -> None:
        super().__init__()
        for name in outputs or ():
            check_choice("outputs", name, inner.output_names)
        self.inner, self.count, self.names = inner, count, tuple(outputs or inner.output_names)
        self.numbers = run.about.task == "regression"
        mean, std = run.config.units
        # Buffers: constants of a graph are in single precision.
        self.register_buffer("shift", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("unit", torch.tensor(std, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs for rows as the net takes them."""
        outputs = dict(zip(self.inner.output_names, self.inner(x), strict=True))
        return tuple(self._scale(name, outputs[name]) for name in self.names)

    def _scale(self, name: str, value: Tensor) -> Tensor:
        if not self.numbers:
            return value
        if name in ("mean", "lower", "upper"):
            return value.double() * self.unit + self.shift
        return value.double() * self.unit ** (1 if name == "std" else 2)


def _calibrated(run: Run) -> tuple[Likelihood, Conformal | None]:
    """What an output means, with the scale of the noise; and the rule of intervals, or of sets."""
    choice, likelihood = run.choice, run.elbo.likelihood
    assert isinstance(likelihood, Likelihood)  # a run has one of ours
    if choice is None:
        return likelihood, None
    rule = choice.conformal(LEVEL)
    scaled = likelihood.scaled(math.exp(choice.log_scale))
    return scaled, rule if math.isfinite(rule.quantile) else None


@restore_state_on_error
def _functions(run: Run, samples: int, outputs: Sequence[str] | None) -> InUnits:
    """Functions drawn from the posterior with the seed of the run; 0 takes the means."""
    check_integer("samples", samples, 0)
    nets = [run.net.eval()]
    if samples and has_noise(run.net):
        with draw_from(GeneratorNoise(run.config.settings.seed)):  # as `predict` draws them
            nets = list(draws(run.net, samples))
    return InUnits(Answer(nets, *_calibrated(run)), run, len(nets), outputs)


def _frozen(run: Run, mode: Any, samples: int, outputs: Sequence[str] | None) -> InUnits:
    """A run's net as `freeze` makes it."""
    likelihood, rule = _calibrated(run)
    # The scores are of sampled predictions, which the smaller variance of moments would miss.
    rule = rule if mode == "sample" else None
    predictor = freeze(
        run.net.eval(), mode, samples, likelihood=likelihood, conformal=rule, level=LEVEL
    )
    names = [n for n in predictor.output_names if n not in _ON_REQUEST.get(run.about.task, ())]
    graph = predictor.graph(torch.zeros(2, *run.about.shape), outputs or names)
    return InUnits(graph, run, samples, outputs)


def export_run(
    run: Run,
    path: str | Path,
    samples: int = SAMPLES,
    *,
    mode: Literal["functions", "moments", "sample"] = "functions",
    outputs: Sequence[str] | None = None,
) -> int:
    """Write a run as ONNX: raw rows in, answers in the units of the target out.

    Of a table every column is an input under its own name, see
    `vardrop.app.data.onnx_graph.with_preprocessing`; the outputs are those of `Answer`. The answer
    is that of `run.predict(rows, samples, draw="weights")`; with 0 samples that of the means, from
    a file that is smaller by as many times. Numbers are in double precision. Metadata name the
    version, method, likelihood, target, task, classes and columns.

    Args:
        run: a trained run.
        path: the file; it is there whole or not at all.
        samples: draws, of at least one where the mode is none of functions.
        mode: "functions" drawn from the posterior, all in the file; "moments", one pass that
            carries mean and variance, whose interval is that of the predictive distribution and
            not conformal; "sample", draws as the layers' estimators, by the runtime.
        outputs: which, in this order; all by default.

    Returns:
        The bytes on disk.

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = vd.fit("iris", out=f"{folder}/run", epochs=2, folds=1)
    ...     size = export_run(run, f"{folder}/iris.onnx", samples=2)
    >>> size > 1000
    True
    """
    check_target(run, Path(path))
    check_choice("mode", mode, ("functions", "moments", "sample"))
    if mode == "functions":
        return _write(run, _functions(run, samples, outputs), Path(path))
    return _write(run, _frozen(run, mode, samples, outputs), Path(path))


def check_target(run: Run, path: Path) -> None:
    """Refuse a file that is in use, or whose directory is not there."""
    check_output(path, run.directory, run.config.data.name)
    if not path.absolute().parent.is_dir():
        raise VardropError(f"Expected a directory to write {path} into, but there is none.")


def export_small(run: Run, net: nn.Module, path: str | Path) -> int:
    """Write a plain net that was made from a run's as ONNX; of a table with its preprocessing.

    Outputs as of `export_run`; on images those of the net itself.
    """
    if run.about.preprocessing is None:
        return export_onnx(net, path, torch.zeros(1, *run.about.shape))
    return _write(run, InUnits(Answer([net.eval()], *_calibrated(run)), run, 1, None), Path(path))


def _write(run: Run, module: InUnits, path: Path) -> int:
    onnx = needed("onnx", "compress")
    # Nothing inside a graph has the name of an output, or of a column.
    model = onnx.compose.add_prefix(_exported(onnx, module, run.about.shape), "answer/")
    for value, name in zip(model.graph.output, module.names, strict=True):
        model.graph.node.append(onnx.helper.make_node("Identity", [value.name], [name]))
        value.name = name
    metadata = {"samples": str(module.count), "vardrop": version("vardrop")}
    metadata |= {"method": repr(run.config.method), "likelihood": repr(run.elbo.likelihood)}
    metadata |= {
        "task": run.about.task,
        "classes": json.dumps(run.about.classes, ensure_ascii=False),
    }
    onnx.helper.set_model_props(model, metadata)
    if run.about.preprocessing is not None:
        model = with_preprocessing(model, run.about.preprocessing)
    else:
        (value,) = model.graph.input
        model.graph.node.insert(0, onnx.helper.make_node("Identity", ["x"], [value.name]))
        value.name = "x"
    raw = model.SerializeToString()
    write_atomically(path, raw)
    return len(raw)


def _exported(onnx: Any, module: InUnits, shape: tuple[int, ...]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        try:
            export_onnx(module, path, torch.zeros(2, *shape))
        except VardropError:  # some operations are not exported side by side
            if not getattr(module.inner, "together", False):
                raise
            module.inner.together = False
            export_onnx(module, path, torch.zeros(2, *shape))
        return onnx.load(path)
