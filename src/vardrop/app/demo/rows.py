"""The models of the demo: learned noise, and the simpler alternatives to it.

All models have the same layers, optimizer, batches and epochs. Their settings are chosen on
validation digits by one rule, from grids of two or three settings.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vardrop.app.data import Images
from vardrop.compression import Shrunk, pack, shrink, unpack
from vardrop.conversion import convert
from vardrop.likelihoods import Categorical, Likelihood
from vardrop.objective import ELBO, linear_warmup, parameter_groups
from vardrop.prediction import Ensemble, Prediction, calibrate, predict
from vardrop.priors import Normal
from vardrop.recipes import Recipe, bayes_by_backprop, sparse_vd
from vardrop.tuning import fine_tune, train

_RATE, _BATCH, _EPOCHS, _DRAWS, _MEMBERS = 5e-3, 200, 100, 16, 5
_DECAYS, _FRACTIONS = (1e-4, 1e-3, 3e-3), (0.2, 0.1, 0.05)
_KL_WEIGHTS, _SPARSE_KL_WEIGHTS = (0.01, 0.03), (0.03, 0.1)
PLAIN, TEMPERATURE, ENSEMBLE = "plain", "+ temperature", "5 plain models"
DECAY, PRUNED = "weight decay", "+ magnitude pruning"
BAYES, SPARSE = "Bayes by Backprop", "sparse VD, pruned"
ROWS = (PLAIN, TEMPERATURE, ENSEMBLE, DECAY, PRUNED, BAYES, SPARSE)


class Row(NamedTuple):
    """A way to predict, and its cost.

    Args:
        predict: predictions of inputs.
        bytes: the size of its file.
        seconds: CPU seconds of all trainings that it needs, including the choice of its settings.
    """

    predict: Callable[[Tensor], Prediction]
    bytes: int
    seconds: float


class Candidate(NamedTuple):
    """A trained model, its setting, and the size of its file."""

    net: nn.Module
    setting: float
    bytes: int


def make_net() -> nn.Sequential:
    """The model of all rows."""
    return nn.Sequential(nn.Linear(64, 300, bias=False), nn.ReLU(), nn.Linear(300, 10))


def fit(
    data: Images, seed: int, decay: float = 0.0, recipe: Recipe | None = None, beta: float = 0.0
) -> nn.Module:
    """Train a model, with learned noise if there is a recipe.

    Args:
        data: the training digits.
        seed: of the weights, the order of the digits and the noise.
        decay: the weight decay.
        recipe: the method.
        beta: the weight of the KL, which is reached after half of the epochs.
    """
    torch.manual_seed(seed)
    net: nn.Module = make_net()
    if recipe is not None:
        convert(net, recipe)
    elbo = ELBO(net, Categorical(), len(data.y), beta=0.0, kl_value_every=10)
    groups = parameter_groups(elbo, _RATE, weight_decay=decay)
    optimizer = torch.optim.Adam(groups, fused=True)
    warmup = linear_warmup(0, _EPOCHS / 2, beta)
    for _ in train(elbo, optimizer, *data, _EPOCHS, _BATCH, beta=warmup, seed=seed, progress=False):
        pass
    return net.eval()


def packed(model: Shrunk | nn.Module, setting: float) -> Candidate:
    """A model that was written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.vdp"
        size = pack(model, path).bytes
        return Candidate(unpack(path, into=make_net()).eval(), setting, size)


def prune_magnitudes(net: nn.Module, fraction: float, decay: float, data: Images) -> Candidate:
    """Keep the largest weights of a model and train them for half of the epochs."""
    net = copy.deepcopy(net).train()
    weights = [p for p in net.parameters() if p.dim() == 2]
    with torch.no_grad():
        least = torch.cat([w.abs().flatten() for w in weights]).quantile(1 - fraction)
        for weight in weights:
            weight.mul_(weight.abs() >= least)
    optimizer = torch.optim.Adam(net.parameters(), _RATE, weight_decay=decay, fused=True)
    batches = list(zip(data.x.split(_BATCH), data.y.split(_BATCH), strict=True))
    fine_tune(net, batches, F.cross_entropy, optimizer, _EPOCHS // 2, progress=False)
    return packed(net.eval(), fraction)


def mean_predictor(
    net: nn.Module, likelihood: Likelihood | None = None
) -> Callable[..., Prediction]:
    """Predictions of a model without noise."""
    return lambda x: predict(net, x, 1, mode="mean", likelihood=likelihood, seed=0)


def noisy_predictor(net: nn.Module) -> Callable[..., Prediction]:
    """Predictions of a model with noise."""
    return lambda x: predict(net, x, _DRAWS, seed=0, keep=0)


def choose(
    candidates: Sequence[Candidate],
    validation: Images,
    make_predictor: Callable[[nn.Module], Callable[..., Prediction]] = mean_predictor,
) -> Candidate:
    """The last candidate whose validation NLL is within one standard error of the best.

    Candidates are sorted from the least to the most regularized.
    """
    logs = [make_predictor(candidate.net)(validation.x).log_probs for candidate in candidates]
    losses = [F.nll_loss(log, validation.y, reduction="none") for log in logs]
    gaps = [loss - min(losses, key=torch.mean) for loss in losses]
    errors = [gap.std() / len(gap) ** 0.5 for gap in gaps]
    triples = zip(candidates, gaps, errors, strict=True)
    return [candidate for candidate, gap, error in triples if gap.mean() <= error][-1]


def train_rows(seed: int, data: Images, validation: Images) -> Iterator[tuple[str, Row]]:
    """Train all models and choose their settings, one after the other.

    Args:
        seed: of all trainings.
        data: the training digits.
        validation: the digits for all choices.
    """
    size = 4 * sum(p.numel() for p in make_net().parameters())
    start = time.process_time()

    def row(name: str, predictor: Callable[..., Prediction], count: int = size) -> tuple[str, Row]:
        return name, Row(predictor, count, time.process_time() - start)

    plain = fit(data, seed)
    yield row(PLAIN, mean_predictor(plain))
    temperature = calibrate(plain, validation, seed=0, progress=False)
    yield row(TEMPERATURE, mean_predictor(plain, temperature))
    others = [fit(data, 1000 * k + seed) for k in range(1, _MEMBERS)]
    yield row(ENSEMBLE, Ensemble([plain, *others]), _MEMBERS * size)
    start = time.process_time()
    decayed = [Candidate(fit(data, seed, decay), decay, size) for decay in _DECAYS]
    chosen = choose(decayed, validation)
    yield row(DECAY, mean_predictor(chosen.net))
    pruned = [
        prune_magnitudes(chosen.net, fraction, chosen.setting, data) for fraction in _FRACTIONS
    ]
    small = choose(pruned, validation)
    yield row(PRUNED, mean_predictor(small.net), small.bytes)
    start = time.process_time()
    recipe = bayes_by_backprop(Normal(learned=True))
    noisy = [Candidate(fit(data, seed, 0.0, recipe, b), b, 2 * size) for b in _KL_WEIGHTS]
    bayes = choose(noisy, validation, noisy_predictor)
    yield row(BAYES, noisy_predictor(bayes.net), bayes.bytes)
    start = time.process_time()
    sparse = [(b, fit(data, seed, 0.0, sparse_vd(), b)) for b in _SPARSE_KL_WEIGHTS]
    files = [packed(shrink(net, validation.x), b) for b, net in sparse]
    smallest = choose(files, validation)
    yield row(SPARSE, mean_predictor(smallest.net), smallest.bytes)
