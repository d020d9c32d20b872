"""Out-of-distribution inputs and distribution shift: several methods on one digit model.

A dense model 784-300-100-10 with BatchNorm and no biases in its hidden layers, for every method.
All train for the same number of epochs with the same optimizer. OOD inputs are detected by the
entropy of the prediction, and by the mutual information of prediction and weights if there is
noise. Corrupted and rotated digits are scored as classification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines import InputNoise
from experiments.corruptions import CORRUPTIONS, corrupted, rotated
from experiments.trainings import Watch, images, learned
from vardrop import metrics
from vardrop.app.data import Images
from vardrop.conversion import convert
from vardrop.likelihoods import Likelihood, entropy
from vardrop.objective import ELBO, Categorical, linear_warmup, parameter_groups
from vardrop.prediction import FeatureDistance, calibrate, predict
from vardrop.priors import Normal
from vardrop.recipes import (
    bayes_by_backprop,
    binary_dropout,
    sparse_vd,
    variance_layer,
    variational_dropout,
)
from vardrop.tuning import Loop

_BATCH = 1000
_OOD_SETS = {"notmnist": "notMNIST", "fashion-mnist": "Fashion-MNIST"}
Scores = dict[str, float]


def digit_net(inputs: int = 784, first: int = 300, second: int = 100) -> nn.Sequential:
    """The net of all methods."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(inputs, first, bias=False), nn.BatchNorm1d(first), nn.ReLU()),
        *(nn.Linear(first, second, bias=False), nn.BatchNorm1d(second), nn.ReLU()),
        nn.Linear(second, 10),
    )


METHODS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deterministic": lambda net: net,
    "dropout": partial(convert, recipe=binary_dropout(0.5), exclude="1"),
    "variational dropout": partial(convert, recipe=variational_dropout("B"), exclude="1"),
    "sparse VD": partial(convert, recipe=sparse_vd()),
    "Bayes by Backprop": partial(convert, recipe=bayes_by_backprop(Normal(learned=True))),
    "variance layer": partial(convert, recipe=variance_layer(), include="4"),
}


class Predictor:
    """The nets of a method, which predict together."""

    def __init__(
        self,
        nets: Sequence[nn.Module],
        samples: int,
        seed: int,
        likelihood: Likelihood | None = None,
    ) -> None:
        self.nets, self.samples, self.seed, self.likelihood = nets, samples, seed, likelihood

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of images, and the entropy that is left within a draw or member."""
        found = []
        for net in self.nets:
            parts = x.split(_BATCH)
            if self.samples:
                p = predict(net, parts, self.samples, seed=self.seed, keep=0)
            else:
                p = predict(net, parts, 1, mode="mean", likelihood=self.likelihood, seed=self.seed)
            found.append((p.log_probs, p.aleatoric))
        logs, inner = (torch.stack(t) for t in zip(*found, strict=True))
        return logs.logsumexp(0).sub(math.log(len(found))).log_softmax(1), inner.mean(0)


def trained(
    name: str, data: Images, epochs: int, seed: int, watch: Watch, part: float, start: int = 0
) -> nn.Module:
    """A net of a method, in evaluation mode; another `start` is another member."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * start + seed)
        net, plain = METHODS[name](digit_net()), name == "deterministic"
        elbo = ELBO(net, Categorical(), len(data.x), beta=0.0 if plain else 1.0)
        optimizer = torch.optim.Adam(learned(net), lr=1e-3)
        # A full KL from the start would prune before there is anything to keep.
        beta = None if plain else linear_warmup(0, epochs)
        loop = Loop(elbo, optimizer, *data, epochs, beta=beta, seed=1000 * start + seed)
        watch.fit(f"{name} {start}", loop, fraction=part)
    return net.eval()


def shifted_digits(
    seed: int,
    epochs: int = 10,
    samples: int = 16,
    examples: int = 60_000,
    tested: int = 2000,
    members: int = 5,
    strengths: Sequence[int] = (1, 3, 5),
    angles: Sequence[int] = (0, 30, 60, 90, 120, 150, 180),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Accuracy, NLL, ECE, AUROC of errors and of OOD inputs, by method and strength.

    Args:
        seed: of everything that is drawn.
        epochs: of every training.
        samples: draws of a prediction.
        examples: digits to train on.
        tested: test digits that are corrupted and rotated; OOD detection uses all of them.
        members: of the ensemble, the deterministic net among them.
        strengths: of the corruptions.
        angles: by which digits are turned, in degrees.
        watch: keeps the trainings.
    """
    watch, data = watch or Watch(), images("mnist", count=examples)
    test = images("mnist", "test")
    part = 0.8 / (len(METHODS) + members - 1)
    plain = [trained("deterministic", data, epochs, seed, watch, part, k) for k in range(members)]
    nets = {"deterministic": plain[:1], f"ensemble of {members}": plain}
    for name in list(METHODS)[1:]:
        nets[name] = [trained(name, data, epochs, seed, watch, part)]
    predictors = {
        name: Predictor(group, 0 if group[0] is plain[0] else samples, seed)
        for name, group in nets.items()
    }
    return _measure(predictors, test, tested, strengths, angles)


def _measure(
    predictors: dict[str, Predictor],
    test: Images,
    tested: int,
    strengths: Sequence[int],
    angles: Sequence[int],
) -> dict[str, Any]:
    """The scores of all methods, clean, corrupted and rotated."""
    some = Images(test.x[:tested], test.y[:tested])
    figures: Scores = {}
    curve: list[dict[str, Any]] = []
    for name, predictor in predictors.items():
        figures |= {f"{k}, {name}": v for k, v in _clean(predictor, test).items()}
        records = [*_corrupted(predictor, some, strengths), *_turned(predictor, some, angles)]
        curve += [{"method": name, **record} for record in records]
        for strength in strengths:
            figures |= {
                f"{key}, strength {strength}, {name}": value
                for key, value in _mean(records, strength).items()
            }
    return {"figures": figures, "curve": curve}


# Three settings for each method: weight decay, standard deviation of the input noise, drop rate,
# and weight of the KL.
GRIDS: dict[str, tuple[float, ...]] = {
    "plain": (0.0,),
    "weight decay": (1e-4, 1e-3, 1e-2),
    "input noise": (0.1, 0.3, 0.6),
    "dropout": (0.1, 0.25, 0.5),
    "Bayes by Backprop": (0.01, 0.1, 1.0),
    "sparse VD": (0.01, 0.1, 1.0),
}


def tuned_digits(
    seed: int,
    epochs: int = 10,
    samples: int = 16,
    examples: int = 12_000,
    validated: int = 2000,
    tested: int = 1000,
    members: int = 5,
    strengths: Sequence[int] = (1, 3, 5),
    angles: Sequence[int] = (0, 30, 60, 90),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """The scores of `shifted_digits` with tuned baselines, and OOD detection by feature distance.

    Every method chooses from three settings by the NLL of validation images, which follow the
    training images. The ensemble uses the chosen weight decay.
    """
    everything, test = images("mnist"), images("mnist", "test")
    data = Images(everything.x[:examples], everything.y[:examples])
    later = slice(examples, examples + validated)
    validation = Images(everything.x[later], everything.y[later])

    watch = watch or Watch()
    part = 0.8 / (sum(map(len, GRIDS.values())) + members - 1)

    def predictor(row: str, setting: float, start: int = 0) -> Predictor:
        with torch.random.fork_rng(devices=[]):
            loop = _row_loop(row, setting, data, epochs, 1000 * start + seed)
            watch.fit(f"{row} {setting:g} {start}", loop, fraction=part)
        net = loop.elbo.net.eval()
        draws = samples if row in ("dropout", "Bayes by Backprop", "sparse VD") else 0
        return Predictor([net], draws, seed)

    def loss(candidate: Predictor) -> float:
        return float(metrics.nll_from_log_probs(candidate(validation.x)[0], validation.y))

    predictors: dict[str, Predictor] = {}
    settings: Scores = {}
    for row, grid in GRIDS.items():
        candidates = {setting: predictor(row, setting) for setting in grid}
        settings[row] = min(grid, key=lambda setting: loss(candidates[setting]))
        predictors[row] = candidates[settings[row]]
    plain, decayed = predictors["plain"], predictors["weight decay"]
    temperature = calibrate(plain.nets[0], validation, seed=seed)
    predictors["temperature"] = Predictor(plain.nets, 0, seed, temperature)
    others = [predictor("weight decay", settings["weight decay"], k) for k in range(1, members)]
    group = [decayed.nets[0], *(other.nets[0] for other in others)]
    predictors[f"ensemble of {members}, weight decay"] = Predictor(group, 0, seed)
    result = _measure(predictors, test, tested, strengths, angles)
    result["figures"] |= {f"setting, {row}": value for row, value in settings.items()}
    for row in ("plain", "weight decay"):
        distance = FeatureDistance(predictors[row].nets[0], data)
        for name, title in _OOD_SETS.items():
            auroc = metrics.auroc(distance(test.x), distance(images(name, "test").x))
            result["figures"][f"AUROC {title} by feature distance, {row}"] = float(auroc)
    return result


def _row_loop(row: str, setting: float, data: Images, epochs: int, seed: int) -> Loop:
    """The training of a row with a setting; the noise is drawn from torch's global generator."""
    torch.manual_seed(seed)
    net: nn.Module = digit_net()
    learns_noise = row in ("Bayes by Backprop", "sparse VD")
    if row == "input noise":
        net = nn.Sequential(InputNoise(setting), net)
    elif row == "dropout":
        convert(net, binary_dropout(setting), exclude="1")
    elif learns_noise:
        METHODS[row](net)
    elbo = ELBO(net, Categorical(), len(data.x), beta=setting if learns_noise else 0.0)
    decay = setting if row == "weight decay" else 0.0
    optimizer = torch.optim.Adam(parameter_groups(elbo, 1e-3, weight_decay=decay))
    beta = linear_warmup(0, epochs / 2, setting) if learns_noise else None
    return Loop(elbo, optimizer, *data, epochs, beta=beta, seed=seed)


def _clean(predictor: Predictor, test: Images) -> Scores:
    """Scores of test digits, and how well OOD inputs are detected."""
    logs, inner = predictor(test.x)
    found = {f"{key}, clean": value for key, value in _scores(logs, test.y).items()}
    total = _entropy(logs)
    for name, title in _OOD_SETS.items():
        other, within = predictor(images(name, "test").x)
        found[f"AUROC {title} by entropy"] = float(metrics.auroc(total, _entropy(other)))
        if predictor.samples or len(predictor.nets) > 1:
            known, strange = total - inner, _entropy(other) - within
            found[f"AUROC {title} by information"] = float(metrics.auroc(known, strange))
    return found


def _entropy(logs: Tensor) -> Tensor:
    return entropy(logs, logs.exp(), 1)


def _scores(logs: Tensor, y: Tensor) -> Scores:
    probs, doubt = logs.exp(), _entropy(logs)
    wrong = probs.argmax(1) != y
    apart = metrics.auroc(doubt[~wrong], doubt[wrong]) if 0 < int(wrong.sum()) < len(y) else 0.5
    return {
        "accuracy": 100 * float(metrics.accuracy(probs, y)),
        "NLL": float(metrics.nll_from_log_probs(logs, y)),
        "ECE": float(metrics.ece(probs, y)),
        "AUROC of errors": float(apart),
    }


def _corrupted(
    predictor: Predictor, data: Images, strengths: Sequence[int]
) -> list[dict[str, Any]]:
    """A record for each kind and strength; corruptions are the same for all methods and seeds."""
    found = []
    for kind in CORRUPTIONS:
        for strength in strengths:
            logs, _ = predictor(corrupted(kind, data.x, strength, seed=strength))
            found.append({"corruption": kind, "strength": strength, **_scores(logs, data.y)})
    return found


def _turned(predictor: Predictor, data: Images, angles: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for angle in angles:
        turn = torch.deg2rad(torch.full((len(data.x),), float(angle)))
        logs, _ = predictor(rotated(data.x, turn))
        found.append({"angle": angle, **_scores(logs, data.y)})
    return found


def _mean(records: Sequence[dict[str, Any]], strength: int) -> Scores:
    """The scores of all corruptions of a strength, averaged."""
    own = [r for r in records if r.get("strength") == strength]
    keys = ("accuracy", "NLL", "ECE", "AUROC of errors")
    return {key: sum(r[key] for r in own) / len(own) for key in keys}
