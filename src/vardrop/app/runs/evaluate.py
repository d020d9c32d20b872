"""Score a run: on validation data while it trains, on test data at its end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vardrop import metrics
from vardrop.app.runs import scores
from vardrop.app.runs.config import Config, working
from vardrop.app.runs.run import SAMPLES, Run, predicted
from vardrop.compression import masked
from vardrop.app.data import Part, load_out_of_distribution
from vardrop._core.errors import VardropError
from vardrop._core.files import write_tensors
from vardrop.functional.normal import LOG_2PI
from vardrop.gates import Gate
from vardrop.layers import Variational
from vardrop.likelihoods import Gaussian
from vardrop.metrics.checks import averaged
from vardrop.noisy import has_noise, log_alpha, relevance, tensor_name

if TYPE_CHECKING:
    from vardrop.objective import ELBO
    from vardrop.prediction import Prediction

_SHOWN = 16  # images in the report
_VALIDATION_SAMPLES = 8
_WEIGHED = (
    "The classes were weighed in training: probabilities, NLL, Brier score and calibration error "
    "are those of data where the classes are as frequent as the weights make them."
)
_UNTESTED = "No rows were kept for a test: the scores are of rows that were held out in turn."


def validation_scores(elbo: ELBO, part: Part, config: Config) -> dict[str, float]:
    """NLL and accuracy, or NLL and RMSE in the units of the target (runs of 0.1: of scaled ones).

    The net's means predict; draws do where the means are zero by construction. A plain net's own
    width of noise follows its training error and would stop it far too early, so its NLL has the
    width that suits these rows best.
    """
    empty_means = any(
        isinstance(m, Variational) and m.posterior is not None and m.posterior.zero_mean
        for m in elbo.net.modules()
    )
    p = predicted(elbo, part.x, _VALIDATION_SAMPLES if empty_means else 0, seed=0)
    weight = part.weight
    nll = -float(averaged(p.log_prob(part.y), weight))
    if p.classifies:
        return {"nll": nll, "accuracy": float(metrics.accuracy(p.probs, part.y, weight))}
    found = config.about.preprocessing
    scale = found.target_std if found is not None else 1.0
    square = (p.mean - part.y).square().flatten()
    width = float(averaged(square, weight).sqrt())
    if isinstance(p.likelihood, Gaussian) and not has_noise(elbo.net):
        nll = math.log(max(width, 1e-6)) + 0.5 * (LOG_2PI + 1)
    # What an older run compares its epochs with has been stored in scaled units.
    return {"nll": nll + (math.log(scale) if config.version > 2 else 0.0), "rmse": scale * width}


def evaluate(run: Run, ood: Sequence[str] = (), samples: int = SAMPLES) -> dict[str, Any]:
    """Score a run on test data, tell those from other sets, and keep the results with the run.

    Args:
        run: a trained run.
        ood: image sets that the net was not trained on; see `load_out_of_distribution`.
        samples: draws of the noise.

    Returns:
        The content of results.json: `metrics`, those to be read first at the beginning, `by_class`
        and `confusion`; `baseline`, the same scores of the mean or of the most frequent class;
        `notes`, what the test rows cannot tell; `ood` with areas under the ROC curve; `held_out`,
        what rows that were held out of the training decided, and `against`, by how much the net is
        worse on them than others. A score that is undefined or not finite is None, and `notes` or
        `not_finite` say why.
    """
    with working(run.directory):
        return measure(run, ood, samples)


def measure(run: Run, ood: Sequence[str] = (), samples: int = SAMPLES) -> dict[str, Any]:
    """What `evaluate` does, for a caller that has the directory to itself."""
    arrays_path = run.directory / "arrays.safetensors"
    arrays = run.arrays()
    results: dict[str, Any] = {
        "ood": {},
        "compression": {},
        "curve": [],
        **run.results,
        "task": run.data.task,
        "known": _known(run),
        "held_out": {} if run.choice is None else run.choice.to_json(),
        "against": {} if run.choice is None else _against(run.choice.rows),
        "layers": _layers(run.net),
        "metrics": {},
        "notes": [_UNTESTED, *_on_weights(run)],
    }
    if len(run.data.test.y):
        p = run.predict(run.data.test.x, samples)
        y = in_units(run, run.data.test.y)
        apart, others = _out_of_distribution(p, run, ood, samples)
        results |= score_prediction(run, p, y, run.data.test.weight, results["known"])
        results["ood"] = {**results["ood"], **apart}
        arrays |= {**(_of_classes if p.classifies else _of_numbers)(p, run, y), **others}
        arrays |= _by_row(p, y, run.data.test.weight)
        results["test_rows"] = run.data.test_rows
    elif ood:
        raise VardropError(f"Expected test rows to tell {', '.join(ood)} from. {_UNTESTED}")
    arrays = {**_layer_arrays(run), **arrays}
    write_tensors(arrays_path, arrays)
    run.keep(results)
    return run.results


def _out_of_distribution(
    p: Prediction, run: Run, names: Sequence[str], samples: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Areas under the ROC curve by set, and the uncertainties of their images."""
    apart, arrays, directory = {}, {}, run.config.data.directory
    for name in names:
        images = load_out_of_distribution(name, run.about.shape, directory)
        other = run.predict(images, samples)
        apart[name] = _told_apart(p, other)
        arrays[f"entropy_out_{name}"] = other.entropy
        arrays[f"epistemic_out_{name}"] = other.epistemic
    return apart, arrays


def _known(run: Run) -> dict[str, Any]:
    """What the targets of the rows that were trained on say alone: all that no net needs."""
    rows = run.data.train.join(run.data.validation)
    weight = None if rows.weight is None else rows.weights
    if run.about.task == "classification":
        counts = torch.bincount(rows.y, weight, len(run.about.classes))
        return {"counts": counts.tolist()}
    y = in_units(run, rows.y).double().flatten()
    mean = float(averaged(y, weight))
    return {"mean": mean, "std": float(averaged((y - mean).square(), weight).sqrt())}


def known_targets(run: Run) -> dict[str, Any]:
    """The same from the results of a run, or from its data where they are older."""
    found: dict[str, Any] | None = run.results.get("known")
    return found or _known(run)


def in_units(run: Run, y: Tensor) -> Tensor:
    """Targets in the units that people know; classes as they are."""
    found = run.about.preprocessing
    if found is None or run.about.task == "classification":
        return y
    return y * found.target_std + found.target_mean


def score_prediction(
    run: Run, p: Prediction, y: Tensor, weight: Tensor | None, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Scores of a prediction of rows whose targets are known, and those of no net beside them."""
    if not p.classifies:
        interval = run.interval(p, scores.LEVEL)
        scored = scores.number_scores(p.mean, p.std, p.log_prob(y), y, interval, weight)
        constant = scores.constant(known["mean"], known["std"], y, weight)
        return {**dataclasses.asdict(scored), "baseline": {"name": "mean", **constant}}
    classes, counts = run.about.classes, torch.tensor(known["counts"]).double()
    # From log-probabilities: a probability that has rounded to zero would make the NLL infinite.
    scored = scores.class_scores(p.probs, p.log_prob(y), y, classes, counts / counts.sum(), weight)
    scored.notes.extend(_on_weights(run))
    majority = scores.majority(counts, y, classes, weight)
    return {**dataclasses.asdict(scored), "baseline": {"name": "majority", **majority}}


def _on_weights(run: Run) -> list[str]:
    """What weights of classes do to probabilities."""
    return [] if run.config.settings.class_weight is None else [_WEIGHED]


def _by_row(p: Prediction, y: Tensor, weight: Tensor | None) -> dict[str, Tensor]:
    """What a comparison with other runs needs of each row."""
    found = {"log_prob": p.log_prob(y).double().flatten()}
    return found if weight is None else {**found, "row_weight": weight}


def _of_classes(p: Prediction, run: Run, y: Tensor) -> dict[str, Tensor]:
    data = run.data
    arrays = {"probs": p.probs, "labels": y, "entropy_in": p.entropy, "epistemic_in": p.epistemic}
    if data.kind == "image":
        order, (chance, guess) = p.entropy.argsort(), p.probs.max(1)
        told = torch.stack([y.double(), guess.double(), chance.double()], 1)
        for which, rows in (("most", order[:_SHOWN]), ("least", order.flip(0)[:_SHOWN])):
            arrays[f"images_{which}_certain"] = data.test.x[rows]
            arrays[f"told_{which}_certain"] = told[rows]
    return arrays


def _of_numbers(p: Prediction, run: Run, y: Tensor) -> dict[str, Tensor]:
    lower, upper = run.interval(p, scores.LEVEL)
    return {"x": run.data.test.x, "y": y, "mean": p.mean, "lower": lower, "upper": upper}


def _against(rows: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """By how much the NLL of held-out rows is above that of the others, with its standard error."""
    found = {}
    for name, other in rows.items():
        if "net" in rows and name != "net":
            worse = rows["net"] - other
            error = float(worse.std(correction=0)) / math.sqrt(len(worse))
            found[name] = {"nll": float(worse.mean()), "error": error}
    return found


def _layers(net: nn.Module) -> list[dict[str, Any]]:
    """Name, kind and number of weights of each layer, biases left out."""
    found = []
    for name, module in net.named_modules():
        own = module.weight_axes if isinstance(module, Variational) else ("weight",)
        counts = [t.numel() for n, t in module.named_parameters(recurse=False) if n in own]
        if counts:
            found.append({"name": name, "kind": type(module).__name__, "weights": sum(counts)})
    return found


def _told_apart(p: Prediction, other: Prediction) -> dict[str, float]:
    found = {"auroc_entropy": float(metrics.auroc(p.entropy, other.entropy))}
    if int(p.samples.max()) > 1:
        found["auroc_epistemic"] = float(metrics.auroc(p.epistemic, other.epistemic))
    return found


@torch.no_grad()
def _layer_arrays(run: Run) -> dict[str, Tensor]:
    """log alpha and weights of the noisy layers, before and after the method's own pruning."""
    if not has_noise(run.net):
        return {}
    layers = {n: m for n, m in run.net.named_modules() if isinstance(m, Variational)}
    arrays = {f"log_alpha.{name}": la for name, la in log_alpha(run.net).items()}
    arrays |= {
        f"weight.{tensor_name(name, own)}": getattr(layer, own)
        for name, layer in layers.items()
        for own in layer.weight_axes
    }
    depends = any(isinstance(m, Gate) and m.noise.input_dependent for m in run.net.modules())
    if relevance(run.net) and not depends:  # else no constant mask says what goes
        pruned, _ = masked(run.net)
        after = dict(pruned.named_parameters())
        arrays |= {
            f"weight_pruned.{tensor_name(name, own)}": after[f"{name}.{own}"]
            for name, layer in layers.items()
            for own in layer.weight_axes
            if f"{name}.{own}" in after
        }
    return arrays
