"""How sure a fine-tuned net is: sparse VD and Bayes by Backprop beside what a user would pick.

One small ResNet per seed, trained on Fashion-MNIST. From it, for as many epochs each: the plain net
trained on, with and without a temperature; the same with dropout before its last layer and after
its blocks, predicted by Monte Carlo; `vardrop.fine_tune` of a noisy copy. And five plain nets from
other starts, together. Temperatures, and every setting, come from images 30 000 to 35 000 of the
training set.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.slim import Part, ResNet, Seed, train
from experiments.trainings import Watch, images
from vardrop import metrics
from vardrop.conversion import convert
from vardrop.estimators import local_reparameterization
from vardrop.likelihoods import Categorical, Likelihood
from vardrop.noisy import has_noise
from vardrop.prediction import FeatureDistance, Prediction, calibrate, predict
from vardrop.priors import Normal
from vardrop.recipes import bayes_by_backprop, mc_dropout, sparse_vd
from vardrop.tuning import fine_tune

_BATCH, _MEMBERS = 128, 5
# Settings to choose from. The first one is used if nothing is chosen.
_DROP_RATES, _BETAS, _DECAYS = (0.1, 0.2, 0.4), (0.01, 0.003, 0.03), (1e-3, 1e-4, 1e-2)
_Pair = tuple[Tensor, Tensor]
_Model = tuple[nn.Module, Any, int]  # a model, its likelihood, how many draws it needs


class LeNet(nn.Module):
    """Two convolutions with max pooling and two dense layers, for images (N, 1, 28, 28)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.dense, self.last = nn.Linear(800, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv2(self.pool(self.relu(self.conv1(x))))))
        return self.last(self.relu(self.dense(x.flatten(1))))


class Depthwise(nn.Module):
    """Three pairs of depthwise and pointwise convolutions, for images (N, 1, 28, 28)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = (width, 2 * width, 3 * width, 4 * width)
        self.stem = nn.Sequential(*_normalized(nn.Conv2d(1, width, 3, 2, 1, bias=False)))
        layers: list[nn.Module] = []
        for inputs, outputs, stride in zip(widths, widths[1:], (1, 2, 1), strict=False):
            depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
            layers += _normalized(depthwise)
            layers += _normalized(nn.Conv2d(inputs, outputs, 1, bias=False))
        self.blocks, self.last = nn.Sequential(*layers), nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.stem(x)).mean((2, 3)))


def _normalized(conv: nn.Conv2d) -> list[nn.Module]:
    return [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU(inplace=True)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "lenet": LeNet,
    "depthwise": Depthwise,
}


def tuned_resnet(
    seed: int,
    model: str = "resnet",
    examples: int = 30_000,
    dense_epochs: int = 3,
    epochs: int = 3,
    lr: float = 4e-3,
    samples: int = 20,
    members: int = _MEMBERS,
    tested: int = 10_000,
    validated: int = 5000,
    baselines: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Accuracy, NLL, ECE, AUROC of errors and of MNIST digits, by way.

    With `baselines` the table has tuned weight decay, alone and in the ensemble, and the feature
    distance of the plain model. Then weight decay, drop rate and KL weight are chosen from three
    values each, by the NLL of the validation images.
    """
    everything, test = images("fashion-mnist"), images("fashion-mnist", "test", tested)
    x, y = everything.x[:examples], everything.y[:examples]
    later = slice(examples, examples + validated)
    held = everything.x[later], everything.y[later]
    digits = images("mnist", "test", tested).x
    parts = Seed(seed, watch or Watch(), 11 if baselines else 7)
    start = parts.trained(_new(model, seed), lambda n: train(n, x, y, dense_epochs, lr, seed))

    def scored(net: nn.Module, likelihood: Any, draws: int) -> Part:
        return _scores(partial(_predicted, net, likelihood, draws), (test.x, test.y), digits)

    def plain(net: nn.Module | None = None, decay: float = 0.0) -> nn.Module:
        return train(copy.deepcopy(net or start), x, y, epochs, lr, seed + 100, decay)

    def best(settings: Sequence[float], make: Callable[[float], _Model]) -> _Model:
        if not baselines:
            return make(settings[0])
        return min(map(make, settings), key=lambda model: _nll(model, held))

    def decayed(decay: float) -> _Model:
        return plain(decay=decay), Categorical(), 0

    def tempered() -> Part:
        net = plain()
        return scored(net, calibrate(net, held), 0)

    def dropped(rate: float) -> _Model:
        net = plain(_with_dropout(start, rate))
        convert(net, mc_dropout())
        return net, Categorical(), samples

    def tuned(recipe: Any, beta: float) -> _Model:
        return tune(recipe, epochs=epochs, lr=lr, beta=beta)

    def tune(recipe: Any, **options: Any) -> _Model:
        net = convert(copy.deepcopy(start), recipe)
        elbo = fine_tune(net, _Shuffled(x, y), validation=held, **options)
        return elbo.net, elbo.likelihood, samples if has_noise(elbo.net) else 0

    def together(decay: float) -> Part:
        total = dense_epochs + epochs
        others = [
            train(_new(model, 100 * seed + k), x, y, total, lr, seed + k, decay)
            for k in range(1, members)
        ]
        nets = [plain(decay=decay), *others]
        return _scores(lambda z: [_predicted(n, Categorical(), 0, z) for n in nets],
                       (test.x, test.y), digits)  # fmt: skip

    def best_together() -> Part:
        losses = {decay: _nll(decayed(decay), held) for decay in _DECAYS}
        return together(min(losses, key=losses.__getitem__))

    def distance() -> Part:
        score = FeatureDistance(plain(), (x, y))
        return {"AUROC of digits": float(metrics.auroc(score(test.x), score(digits)))}

    def timed(make: Callable[[], _Model]) -> Part:
        """The scores, with CPU seconds of the training and the NLL without a temperature."""
        before = time.process_time()
        net, likelihood, draws = make()
        seconds = time.process_time() - before
        raw = float(metrics.nll(_predicted(net, Categorical(), draws, test.x).probs, test.y))
        return scored(net, likelihood, draws) | {"raw NLL": raw, "seconds": seconds}

    local = bayes_by_backprop(estimator=local_reparameterization)
    learned_prior = bayes_by_backprop(Normal(learned=True))
    makers: dict[str, Callable[[], Part]] = {
        "plain": lambda: scored(plain(), Categorical(), 0),
        "temperature": tempered,
        "MC dropout": lambda: scored(*best(_DROP_RATES, dropped)),
        "sparse VD": lambda: scored(*best(_BETAS, partial(tuned, sparse_vd()))),
        "Bayes by Backprop": lambda: scored(*best(_BETAS, partial(tuned, learned_prior))),
        f"ensemble of {members}": lambda: together(0.0),
    }
    if baselines:
        makers |= {
            "plain": lambda: timed(lambda: (plain(), Categorical(), 0)),
            "fine_tune": lambda: timed(lambda: tune(bayes_by_backprop())),
            "fine_tune, local": lambda: timed(lambda: tune(local)),
            "weight decay": lambda: scored(*best(_DECAYS, decayed)),
            f"ensemble of {members}, weight decay": best_together,
            "feature distance": distance,
        }
    found = {
        way: parts.part(way, partial(_seeded, make, seed + 100)) for way, make in makers.items()
    }
    return {"figures": {f"{k}, {way}": v for way, f in found.items() for k, v in f.items()}}


def _seeded(make: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _new(model: str, seed: int) -> nn.Module:
    return _seeded(MODELS[model], seed).to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


class _Shuffled:
    """Batches in a new order at every pass, from torch's global generator."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Any:
        rows = torch.randperm(len(self.x)).split(_BATCH)[: max(1, len(self.x) // _BATCH)]
        return ((self.x[r], self.y[r]) for r in rows)


def _with_dropout(net: nn.Module, rate: float) -> nn.Module:
    """The model with dropout after each block, or before the last layer if it has no blocks."""
    twin: Any = copy.deepcopy(net)
    if not isinstance(twin, ResNet):
        twin.last = nn.Sequential(nn.Dropout(rate), twin.last)
        return twin  # type: ignore[no-any-return]
    blocks = [nn.Sequential(block, nn.Dropout(rate)) for block in twin.blocks]
    twin.blocks = nn.Sequential(*blocks)
    return twin


def _predicted(net: nn.Module, likelihood: Likelihood, draws: int, x: Tensor) -> Prediction:
    if draws:
        return predict(net, x.split(500), draws, likelihood=likelihood, seed=0, keep=0)
    return predict(net, x.split(500), 1, mode="mean", likelihood=likelihood)


def _nll(model: _Model, validation: _Pair) -> float:
    net, likelihood, draws = model
    prediction = _predicted(net, likelihood, draws, validation[0])
    return float(metrics.nll(prediction.probs, validation[1]))


def _scores(predicted: Callable[[Tensor], Any], test: _Pair, digits: Tensor) -> Part:
    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp(min=1e-30).log()).sum(1)

    def probs(x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean probabilities and mutual information."""
        found = predicted(x)
        members = found if isinstance(found, list) else [found]
        mean = torch.stack([p.probs for p in members]).mean(0)
        inner = [entropy(p.probs) if p.epistemic is None else p.aleatoric for p in members]
        return mean, entropy(mean) - torch.stack(inner).mean(0)

    (known, information), (other, other_information) = probs(test[0]), probs(digits)
    wrong = known.argmax(1) != test[1]
    doubt = 1 - known.amax(1)

    return {
        "accuracy": 100 * float(metrics.accuracy(known, test[1])),
        "NLL": float(metrics.nll(known, test[1])),
        "ECE": float(metrics.ece(known, test[1])),
        "AUROC of errors": float(metrics.auroc(doubt[~wrong], doubt[wrong])),
        "AUROC of digits": float(metrics.auroc(entropy(known), entropy(other))),
        "AUROC of digits by information": float(metrics.auroc(information, other_information)),
    }
