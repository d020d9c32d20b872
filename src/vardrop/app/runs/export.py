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

from vardrop.app.runs.config import check_output
from vardrop.app.runs.run import SAMPLES, Run
from vardrop._core.checks import check_choice, check_integer
from vardrop.export import export_onnx
from vardrop.app.data.onnx_graph import with_preprocessing
from vardrop._core.errors import VardropError, needed
from vardrop._core.files import write_atomically
from vardrop.functional import drawing, undisturbed
from vardrop.likelihoods import Likelihood, entropy
from vardrop.noisy import has_noise
from vardrop.prediction import draws, freeze
from vardrop.prediction.calibration import conformal_rule

LEVEL = 0.95


class Answer(nn.Module):
    """Functions drawn from a run's net, and what they say together: the parts of a `Prediction`.

    Classes: `probs` (N, C), `entropy`, `aleatoric` and `epistemic` (N,). Numbers, (N, 1): `mean`,
    `std`, `lower` and `upper` of the 95 % interval, the variances `aleatoric` and `epistemic`.

    Args:
        nets: the functions: nets that differ in their numbers alone.
        likelihood: what an output means.
        shift, unit: of the target, mean and deviation by which it was scaled.
        width: half the 95 % interval in standard deviations.
    """

    def __init__(
        self,
        nets: list[nn.Module],
        likelihood: Likelihood,
        shift: float,
        unit: float,
        width: float,
    ) -> None:
        super().__init__()
        parameters, buffers = stack_module_state(nets)
        stacked = {n: t.detach() for n, t in (*parameters.items(), *buffers.items())}
        self.keys, self.count = tuple(stacked), len(nets)
        self.numbers = nn.ParameterList(stacked.values()).requires_grad_(False)
        self._net = (nets[0],)  # no part of this module, whose numbers it is called with
        self.likelihood, self.together = likelihood, len(nets) > 1
        self.shift, self.unit, self.width = shift, unit, width

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        if self.likelihood.class_axis is not None:
            return "probs", "entropy", "aleatoric", "epistemic"
        return "mean", "std", "lower", "upper", "aleatoric", "epistemic"

    def _draws(self, x: Tensor) -> Tensor:
        if self.together:
            return torch.vmap(partial(self._draw, x))(*self.numbers)
        each = ([t[k] for t in self.numbers] for k in range(self.count))
        return torch.stack([self._draw(x, *numbers) for numbers in each])

    def _draw(self, x: Tensor, *numbers: Tensor) -> Tensor:
        found: Tensor = functional_call(self._net[0], dict(zip(self.keys, numbers, strict=True)), x)
        return found

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs for rows as the net takes them."""
        parts = self.likelihood.parts(self._draws(x))
        aleatoric = parts.aleatoric.mean(0)
        if parts.probs is not None:
            probs = parts.probs.mean(0)
            total = entropy(probs.clamp(min=torch.finfo(probs.dtype).tiny).log(), probs, 1)
            return probs, total, aleatoric, (total - aleatoric).clamp(min=0)
        mean, square = parts.location.mean(0), self.unit**2
        shifted = parts.location - mean
        epistemic = square * shifted.square().sum(0) / max(self.count - 1, 1)
        mean, aleatoric = mean * self.unit + self.shift, aleatoric * square
        std = (aleatoric + epistemic).sqrt()
        return (
            mean,
            std,
            mean - self.width * std,
            mean + self.width * std,
            aleatoric,
            epistemic,
        )


@undisturbed
def answer(run: Run, samples: int = SAMPLES) -> Answer:
    """What a run says of rows, as one module of plain nets.

    Args:
        run: a trained run.
        samples: functions drawn from its posterior with the seed of the run; 0 takes the means.
    """
    check_integer("samples", samples, 0)
    if samples == 0 or not has_noise(run.net):
        return _answer(run, [run.net.eval()])
    with drawing(run.config.settings.seed):  # as `predict` draws them
        return _answer(run, list(draws(run.net, samples)))


def _answer(run: Run, nets: list[nn.Module]) -> Answer:
    """What nets say, with the scale of the noise and the width of intervals of the run."""
    choice, found = run.choice, run.about.preprocessing
    scale = 1.0 if choice is None else math.exp(choice.log_scale)
    quantile = math.inf
    if choice is not None and run.about.task == "regression":
        quantile = conformal_rule(choice.deviations, LEVEL).quantile
    normal = math.sqrt(2) * float(torch.erfinv(torch.tensor(LEVEL, dtype=torch.float64)))
    shift, unit = (0.0, 1.0) if found is None else (found.target_mean, found.target_std)
    width = quantile if math.isfinite(quantile) else normal
    likelihood = run.elbo.likelihood
    assert isinstance(likelihood, Likelihood)  # a run has one of ours
    return Answer(nets, likelihood.scaled(scale), shift, unit, width)


class Served(nn.Module):
    """The graph of a frozen predictor of a run, with numbers in the units of the target."""

    together = False

    def __init__(self, graph: Any, count: int, shift: float, unit: float) -> None:
        super().__init__()
        self.inner, self.count, self.names = graph, count, tuple(graph.output_names)
        self.shift, self.unit = shift, unit

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs for rows as the net takes them."""
        found = self.inner(x)
        return tuple(self._in_units(n, t) for n, t in zip(self.names, found, strict=True))

    def _in_units(self, name: str, value: Tensor) -> Tensor:
        if name in ("mean", "lower", "upper") and self.unit != 1:
            return value * self.unit + self.shift
        return value * self.unit ** {"std": 1, "aleatoric": 2, "epistemic": 2}.get(name, 0)


def served(run: Run, mode: Any, samples: int, outputs: Sequence[str] | None) -> Served:
    """A run's net as `freeze` makes it, with the scale of its noise and its conformal rule."""
    choice, found = run.choice, run.about.preprocessing
    likelihood, rule = run.elbo.likelihood, None
    assert isinstance(likelihood, Likelihood)
    if choice is not None:
        likelihood = likelihood.scaled(math.exp(choice.log_scale))
        rule = conformal_rule(choice.deviations, LEVEL)
        # The scores are of sampled predictions, which the smaller variance of moments would miss.
        rule = rule if math.isfinite(rule.quantile) and mode == "sample" else None
    predictor = freeze(
        run.net.eval(), mode, samples, likelihood=likelihood, conformal=rule, level=LEVEL
    )
    names = [n for n in predictor.output_names if n not in _ON_REQUEST.get(run.about.task, ())]
    graph = predictor.graph(torch.zeros(2, *run.about.shape), outputs or names)
    shift, unit = (0.0, 1.0) if found is None else (found.target_mean, found.target_std)
    return Served(graph, samples, shift, unit)


_ON_REQUEST = {"classification": ("lower", "upper", "set")}


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
    `vardrop.app.data.onnx_graph.with_preprocessing`; the outputs are those of `Answer`. The answer is that
    of `run.predict(rows, samples, draw="weights")`; with 0 samples that of the means, from a file
    that is smaller by as many times. Metadata name the version, method, likelihood, target, task,
    classes and columns.

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
    check_output(Path(path), run.directory, run.config.data.name)
    if not Path(path).absolute().parent.is_dir():
        raise VardropError(f"Expected a directory to write {path} into, but there is none.")
    check_choice("mode", mode, ("functions", "moments", "sample"))
    if mode == "functions":
        return _written(run, answer(run, samples), Path(path), outputs)
    return _written(run, served(run, mode, samples, outputs), Path(path))


def export_small(run: Run, net: nn.Module, path: str | Path) -> int:
    """Write a plain net that was made from a run's as ONNX; of a table with its preprocessing.

    Outputs as of `export_run`; on images those of the net itself.
    """
    if run.about.preprocessing is None:
        return export_onnx(net, path, torch.zeros(1, *run.about.shape))
    return _written(run, _answer(run, [net.eval()]), Path(path))


def _written(
    run: Run, module: Answer | Served, path: Path, outputs: Sequence[str] | None = None
) -> int:
    onnx = needed("onnx", "compress")
    for name in outputs or ():
        check_choice("outputs", name, module.names)
    example = torch.zeros(2, *run.about.shape)
    model = _named(onnx, _exported(onnx, module, example), module.names)
    if outputs is not None:
        there = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(there[name] for name in outputs)
    onnx.helper.set_model_props(model, {"samples": str(module.count), **_metadata(run)})
    if run.about.preprocessing is not None:
        model = with_preprocessing(model, run.about.preprocessing)
    else:
        _name_input(onnx, model, "x")
    raw = model.SerializeToString()
    write_atomically(path, raw)
    return len(raw)


def _metadata(run: Run) -> dict[str, str]:
    """What a reader of the file should know of the run."""
    return {
        "vardrop": version("vardrop"),
        "method": repr(run.config.method),
        "likelihood": repr(run.elbo.likelihood),
        "task": run.about.task,
        "classes": json.dumps(run.about.classes, ensure_ascii=False),
    }


def _exported(onnx: Any, module: Answer | Served, example: Tensor) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        try:
            export_onnx(module, path, example)
        except VardropError:  # some operations are not exported side by side
            if not module.together:
                raise
            module.together = False
            export_onnx(module, path, example)
        return onnx.load(path)


def _named(onnx: Any, model: Any, names: tuple[str, ...]) -> Any:
    """The same graph with these names of its outputs, which nothing inside has."""
    found = onnx.compose.add_prefix(model, "answer/")
    for value, name in zip(found.graph.output, names, strict=True):
        found.graph.node.append(onnx.helper.make_node("Identity", [value.name], [name]))
        value.name = name
    return found


def _name_input(onnx: Any, model: Any, name: str) -> None:
    """Give the one input of a graph this name."""
    (value,) = model.graph.input
    model.graph.node.insert(0, onnx.helper.make_node("Identity", [name], [value.name]))
    value.name = name
