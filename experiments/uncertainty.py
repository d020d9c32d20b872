"""How sure a fine-tuned net is: sparse VD and Bayes by Backprop beside what a user would pick.

One small ResNet per seed, trained on Fashion-MNIST. From it, for as many epochs each: the plain net
trained on, with and without a temperature; the same with dropout before its last layer and after
its blocks, predicted by Monte Carlo; `vardrop.fine_tune` of a noisy copy. And five plain nets from
other starts, together. Temperatures, and every setting, come from images 30 000 to 35 000 of the
training set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.slim import Part, ResNet, Seed, train
from experiments.trainings import Watch, images
from vardrop import metrics
from vardrop.conversion import convert
from vardrop.likelihoods import Categorical, Likelihood
from vardrop.prediction import Prediction, calibrate, predict
from vardrop.priors import Normal
from vardrop.recipes import bayes_by_backprop, mc_dropout, sparse_vd
from vardrop.tuning import fine_tune

_BATCH, _HELD_OUT, _RATE, _MEMBERS = 128, 5000, 0.1, 5
_Pair = tuple[Tensor, Tensor]


def tuned_resnet(
    seed: int,
    examples: int = 30_000,
    dense_epochs: int = 3,
    epochs: int = 3,
    lr: float = 4e-3,
    samples: int = 20,
    members: int = _MEMBERS,
    tested: int = 10_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Accuracy, NLL, ECE, AUROC of errors and of MNIST digits, by way."""
    everything, test = images("fashion-mnist"), images("fashion-mnist", "test", tested)
    x, y = everything.x[:examples], everything.y[:examples]
    later = slice(examples, examples + _HELD_OUT)
    held = everything.x[later], everything.y[later]
    digits = images("mnist", "test", tested).x
    parts = Seed(seed, watch or Watch(), 7)
    start = parts.trained(_new(seed), lambda n: train(n, x, y, dense_epochs, lr, seed))

    def scored(net: nn.Module, likelihood: Any, draws: int) -> Part:
        return _scores(partial(_predicted, net, likelihood, draws), (test.x, test.y), digits)

    def plain(net: nn.Module | None = None) -> nn.Module:
        return train(copy.deepcopy(net or start), x, y, epochs, lr, seed + 100)

    def tempered() -> Part:
        net = plain()
        return scored(net, calibrate(net, *held), 0)

    def dropped() -> Part:
        net = plain(_with_dropout(start))
        convert(net, mc_dropout())
        return scored(net, Categorical(), samples)

    def tuned(recipe: Any) -> Part:
        net = convert(copy.deepcopy(start), recipe)
        elbo = fine_tune(net, _Shuffled(x, y), epochs=epochs, validation=held, lr=lr)
        return scored(elbo.net, elbo.likelihood, samples)

    def together() -> Part:
        total = dense_epochs + epochs
        others = [train(_new(100 * seed + k), x, y, total, lr, seed + k) for k in range(1, members)]
        nets = [plain(), *others]
        return _scores(lambda z: [_predicted(n, Categorical(), 0, z) for n in nets],
                       (test.x, test.y), digits)  # fmt: skip

    makers: dict[str, Callable[[], Part]] = {
        "plain": lambda: scored(plain(), Categorical(), 0),
        "temperature": tempered,
        "MC dropout": dropped,
        "sparse VD": lambda: tuned(sparse_vd()),
        "Bayes by Backprop": lambda: tuned(bayes_by_backprop(Normal(learned=True))),
        f"ensemble of {members}": together,
    }
    found = {
        way: parts.part(way, partial(_seeded, make, seed + 100)) for way, make in makers.items()
    }
    return {"figures": {f"{k}, {way}": v for way, f in found.items() for k, v in f.items()}}


def _seeded(make: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _new(seed: int) -> nn.Module:
    return _seeded(ResNet, seed).to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


class _Shuffled:
    """Batches in a new order at every pass, from torch's global generator."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Any:
        rows = torch.randperm(len(self.x)).split(_BATCH)[: max(1, len(self.x) // _BATCH)]
        return ((self.x[r], self.y[r]) for r in rows)


def _with_dropout(net: nn.Module) -> nn.Module:
    """The net with dropout after each of its blocks, the last of them before the last layer."""
    twin: Any = copy.deepcopy(net)
    blocks = [nn.Sequential(block, nn.Dropout(_RATE)) for block in twin.blocks]
    twin.blocks = nn.Sequential(*blocks)
    return twin


def _predicted(net: nn.Module, likelihood: Likelihood, draws: int, x: Tensor) -> Prediction:
    if draws:
        return predict(net, x.split(500), draws, likelihood=likelihood, seed=0, keep=0)
    return predict(net, x.split(500), 1, mode="mean", likelihood=likelihood)


def _scores(predicted: Callable[[Tensor], Any], test: _Pair, digits: Tensor) -> Part:
    def probs(x: Tensor) -> Tensor:
        found = predicted(x)
        members = found if isinstance(found, list) else [found]
        return torch.stack([p.probs for p in members]).mean(0)

    known, other = probs(test[0]), probs(digits)
    wrong = known.argmax(1) != test[1]
    doubt = 1 - known.amax(1)

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp(min=1e-30).log()).sum(1)

    return {
        "accuracy": 100 * float(metrics.accuracy(known, test[1])),
        "NLL": float(metrics.nll(known, test[1])),
        "ECE": float(metrics.ece(known, test[1])),
        "AUROC of errors": float(metrics.auroc(doubt[~wrong], doubt[wrong])),
        "AUROC of digits": float(metrics.auroc(entropy(known), entropy(other))),
    }
