"""Variance networks: layers without means, how they come about, and how much noise a net takes.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks: when expectation does not meet
your expectations".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.diagnostics import accuracies, transition
from experiments.selective import select, unlabelled_kappa
from experiments.trainings import Record, Watch, batches, images, learned
from vardrop._core.modules import evaluating
from vardrop.app.data import Images
from vardrop.conversion import convert
from vardrop.estimators import local_reparameterization
from vardrop.layers import Variational
from vardrop.metrics import accuracy
from vardrop.noisy import kl, log_alpha, named_modules_of, sampling
from vardrop.objective import ELBO, Categorical, parameter_groups
from vardrop.posteriors import AdditiveGaussian, MultiplicativeGaussian, Noise, Posterior, ZeroMean
from vardrop.prediction import predict
from vardrop.priors import ARD, LogUniform, Prior, StudentT
from vardrop.recipes import Recipe, variance_layer
from vardrop.tuning import Epoch, Loop

DENSE1 = "9"  # the last hidden layer of `lenet5_batchnorm`
HIDDEN = "4"  # the second hidden layer of `small_net`


def lenet5_batchnorm(classes: int = 10) -> nn.Sequential:
    """The paper's LeNet-5: BatchNorm after every layer, no biases."""
    net = nn.Sequential(
        *(nn.Conv2d(1, 20, 5, bias=False), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5, bias=False), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500, bias=False), nn.BatchNorm1d(500), nn.ReLU()),
        nn.Linear(500, classes, bias=False),
    )
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def small_net(inputs: int, bottleneck: int, width: int, classes: int = 10) -> nn.Sequential:
    """inputs-bottleneck-width-classes with BatchNorm; the few inputs of the middle average little.

    A mean drowns where alpha exceeds the number of inputs that it is averaged over.
    """
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(inputs, bottleneck, bias=False), nn.BatchNorm1d(bottleneck), nn.ReLU()),
        *(nn.Linear(bottleneck, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
        nn.Linear(width, classes),
    )


def variance_lenet5(
    seed: int,
    noise: Noise = "gaussian",
    layers: tuple[str, ...] = (DENSE1,),
    epochs: int = 12,
    samples: int = 100,
    examples: int = 60_000,
    tests: int = 10_000,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Accuracy by one draw, by the mean weights (which are zero) and by an ensemble.

    Adam at 1e-3 falling linearly to 0, batches of 200.
    """
    data, test = images("mnist", count=examples), images("mnist", "test", tests)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = convert(lenet5_batchnorm(), variance_layer(noise), include=list(layers))
        elbo = ELBO(net, Categorical(), num_data=len(data.x))
        optimizer = torch.optim.Adam(learned(net), lr=1e-3, fused=True)
        rate = _falling(epochs)
        loop = Loop(elbo, optimizer, *data, epochs, batch_size=200, rate=rate, seed=seed)
        (watch or Watch()).fit("variance net", loop, fraction=0.8)
        found = accuracies(net, batches(test), samples)
    figures = {
        "one draw, %": 100 * found.sample,
        "deterministic, %": 100 * found.deterministic,
        "ensemble, %": 100 * found.ensemble,
    }
    return {"figures": figures}


def _falling(epochs: int) -> Any:
    """From 1 linearly to 0."""
    return lambda epoch: 1 - epoch / epochs


Parameterisation = Literal["layer", "neuron", "weight", "additive"]
PARAMETERISATIONS: dict[Parameterisation, Posterior] = {
    "layer": MultiplicativeGaussian(math.exp(-5), per="layer"),
    "neuron": MultiplicativeGaussian(math.exp(-5), per="output"),
    "weight": MultiplicativeGaussian(math.exp(-5), per="weight"),
    "additive": AdditiveGaussian(-10.0),
}
PRIORS: dict[str, Prior] = {
    "log-uniform": LogUniform(),
    "ard": ARD(),
    "student-t": StudentT(1.0, 0.1, form="bound"),
}


def parameterisation(
    seed: int,
    kind: Parameterisation = "layer",
    prior: str = "log-uniform",
    samples: int = 50,
    examples: int = 60_000,
    tests: int = 10_000,
    watch: Watch | None = None,
    **options: Any,
) -> dict[str, Any]:
    """ELBO and accuracies, how they came about, and what is left without the means."""
    data, test = images("mnist", count=examples), images("mnist", "test", tests)
    run = train_parameterisation(
        kind, data, test, prior, seed=seed, watch=watch or Watch(), **options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = accuracies(run.net, batches(test), samples)
        divergence = to_variance(run.net)
        after = accuracies(run.net, batches(test), samples)
    figures = {
        "ELBO, nats": run.elbo,
        "deterministic, %": 100 * before.deterministic,
        "one draw, %": 100 * before.sample,
        "ensemble, %": 100 * before.ensemble,
        "ensemble without means, %": 100 * after.ensemble,
        "KL to the net without means, nats": divergence,
        "log alpha, mean": run.curve[-1]["mean log alpha"],
    }
    return {"figures": figures, "curve": run.curve}


@torch.no_grad()
def to_variance(net: nn.Module) -> float:
    """Replace N(mu, sigma^2) weights by N(0, sigma^2) weights in place (sec. 5).

    Returns the KL between the two, mu^2 / (2 sigma^2) = 1 / (2 alpha) for each weight, in nats.
    """
    divergence = 0.0
    for layer in named_modules_of(net, Variational).values():
        noise = {}
        for name, tensor in layer.noisy_tensors().items():
            inverse = torch.exp(-tensor.log_alpha()).expand_as(tensor.mean)
            divergence += inverse.double().sum().item() / 2
            sigma = tensor.variance().expand_as(tensor.mean).sqrt()
            noise[name] = {"sigma": nn.Parameter(sigma.clone())}
        layer.replace_posterior(ZeroMean(), noise)
    return divergence


@dataclass(frozen=True, eq=False)
class Run:
    """A trained net, its ELBO on the training set, and its way there in six records."""

    net: nn.Module
    elbo: float
    curve: list[Record]


def train_parameterisation(
    kind: Parameterisation,
    data: Images,
    test: Images,
    prior: str = "log-uniform",
    bottleneck: int = 100,
    width: int = 1000,
    epochs: int = 60,
    batch_size: int = 200,
    noise_lr: float = 4e-3,
    samples: int = 20,
    late_noise_lr: float | None = None,
    constant: float = 0.5,
    seed: int = 0,
    net: str = "small",
    watch: Watch | None = None,
) -> Run:
    """Variational dropout on the middle of `small_net`, log alpha from -5; logged six times.

    With `net="lenet5"` it is on the last hidden layer of `lenet5_batchnorm` instead.

    The source trains for 200 epochs with one rate; here the noise has four times the rate of the
    means (1e-3), so that log alpha can travel as far in fewer epochs. `late_noise_lr` is its rate
    from the second epoch on. Rates are constant for a part `constant` of the epochs, then fall
    linearly to 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, where = small_net(data.x[0].numel(), bottleneck, width), HIDDEN
        if net == "lenet5":
            model, where = lenet5_batchnorm(), DENSE1
        convert(model, Recipe(PARAMETERISATIONS[kind], PRIORS[prior]), include=where)
        elbo = ELBO(model, Categorical(), num_data=len(data.x))
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, noise_lr=noise_lr), fused=True)

        raised = 1.0 if late_noise_lr is None else late_noise_lr / noise_lr

        def rate(epoch: float) -> tuple[float, float]:
            fall = min(1.0, (1 - epoch / epochs) / (1 - constant))
            return fall, fall * (raised if epoch >= 1 else 1.0)

        def log(epoch: Epoch) -> Record:
            count, last = epoch.epoch + 1, epoch.epoch == epochs - 1
            due = last or count % math.ceil(epochs / 6) == 0
            found = {"mean log alpha": float(log_alpha(model)[where].detach().mean())}
            return found | (_transition(model, test, samples) if due else {})

        loop = Loop(elbo, optimizer, *data, epochs, batch_size, rate=rate, seed=seed)
        records = (watch or Watch()).fit(kind, loop, log, fraction=0.9)
        found = [{k: v for k, v in r.items() if k != "epoch"} for r in records if len(r) > 2]
        curve = [{"sixths of the training": i + 1, **record} for i, record in enumerate(found)]
        return Run(model, _elbo(model, data, 5), curve)


def _transition(net: nn.Module, test: Images, samples: int) -> Record:
    found = transition(net, batches(test), samples)
    return {
        "alpha below 1, %": 100 * found.below_one,
        "alpha above exp(3), %": 100 * found.above,
        "deterministic, %": 100 * found.accuracies.deterministic,
        "ensemble, %": 100 * found.accuracies.ensemble,
    }


@torch.no_grad()
def _elbo(net: nn.Module, data: Images, samples: int) -> float:
    """E log p(data) by draws with BatchNorm in eval mode, minus the KL, in nats."""
    with evaluating(net), sampling(net):
        nll = sum(
            functional.cross_entropy(net(x), y, reduction="sum").item()
            for _ in range(samples)
            for x, y in batches(data)
        )
    return -nll / samples - kl(net).item()


def selective_propagation(
    seed: int,
    epochs: int = 10,
    samples: int = 50,
    examples: int = 60_000,
    tests: int = 10_000,
    shares: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Accuracy where only the weights of the largest |kappa| are drawn, the others their mean."""
    data, test = images("mnist", count=examples), images("mnist", "test", tests)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = convert(small_net(784, 100, 100), variance_layer(), include=HIDDEN)
        elbo = ELBO(net, Categorical(), len(data.x), beta=0.0)
        optimizer, rate = torch.optim.Adam(learned(net), lr=1e-3), _falling(epochs)
        loop = Loop(elbo, optimizer, *data, epochs, batch_size=200, rate=rate, seed=seed)
        (watch or Watch()).fit("variance net", loop, fraction=0.7)
        net.eval()
        kappa = unlabelled_kappa(elbo, data.x[:2000])
        sizes = torch.cat([k.abs().flatten() for k in kappa.values()]).sort().values
        curve = []
        for share in shares:
            least = _exceeded_by(sizes, share)
            some = select(net, kappa, least).net
            found = predict(some, test.x.split(1000), samples, seed=seed, keep=0)
            right = 100 * float(accuracy(found.probs, test.y))
            curve.append({"share of sampled weights": share, "accuracy, %": right})
    figures = {
        f"{100 * r['share of sampled weights']:g} % sampled, accuracy, %": r["accuracy, %"]
        for r in curve
    }
    return {"figures": figures, "curve": curve}


def _exceeded_by(sizes: Tensor, fraction: float) -> float:
    """The size that a fraction of the sorted sizes exceeds."""
    drop = round((1 - fraction) * len(sizes))
    return 0.0 if drop == 0 else float(sizes[drop - 1])


Kind = Literal["relu", "abs", "stand-in"]


class _Abs(nn.Module):
    """|x| of what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class _StandIn(nn.Module):
    """x N(0.80, 0.36), also in evaluation: the half-normal's mean and variance, as a Gaussian."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = math.sqrt(2 / math.pi), 1 - 2 / math.pi
        return x * (mean + math.sqrt(variance) * torch.randn_like(x))


class _Scale(nn.Module):
    """sqrt(x^2 sigma^2): the deviation of a variance layer, without its noise."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sigma = nn.Parameter(nn.Linear(inputs, outputs).weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(functional.linear(x.square(), self.sigma.square()) + 1e-8)


def _tolerant_net(kind: Kind, alpha: float) -> nn.Module:
    """784-300-300-10 whose middle layer has the noise; an infinite alpha is a variance layer."""
    middle: nn.Module = nn.Linear(300, 300, bias=False)
    activation = {"relu": nn.ReLU, "abs": _Abs, "stand-in": _StandIn}[kind]
    if kind == "stand-in":
        middle = _Scale(300, 300)
    net = nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 300, bias=False), nn.BatchNorm1d(300), nn.ReLU()),
        *(middle, activation(), nn.BatchNorm1d(300), nn.Linear(300, 10)),
    )
    if kind == "stand-in":
        return net
    if alpha == math.inf:
        return convert(net, variance_layer(), include="4")
    q = MultiplicativeGaussian(alpha, per="layer", learned=False)
    return convert(net, Recipe(q, estimator=local_reparameterization), include="4")


def noise_tolerance(
    seed: int,
    epochs: int = 10,
    alphas: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0),
    examples: int = 60_000,
    samples: int = 20,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Ensemble and deterministic accuracy against alpha, with ReLU and with the absolute value.

    After the absolute value, a zero-mean Gaussian unit s |e| has mean 0.80 s and deviation 0.60 s:
    it is a unit under Gaussian dropout with alpha = pi/2 - 1 = 0.57, so N(1, infinity) noise before
    the absolute value does what N(1, 0.57) noise does after it.
    """
    data, test, watch = images("mnist", count=examples), images("mnist", "test"), watch or Watch()
    figures: dict[str, float] = {}
    kinds: tuple[Kind, ...] = ("relu", "abs")
    cases = [(kind, alpha) for kind in kinds for alpha in (*alphas, math.inf)]
    for kind, alpha in [*cases, ("stand-in", math.inf)]:
        name = f"{kind}, alpha {'infinite' if alpha == math.inf else format(alpha, 'g')}"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _tolerant_net(kind, alpha)
            elbo = ELBO(net, Categorical(), len(data.x), beta=0.0)
            optimizer = torch.optim.Adam(learned(net), lr=1e-3, fused=True)
            rate = _falling(epochs)
            loop = Loop(elbo, optimizer, *data, epochs, batch_size=200, rate=rate, seed=seed)
            watch.fit(name, loop, fraction=1 / (len(cases) + 1))
            if kind == "stand-in":
                found = _stand_in_accuracy(net, test, samples)
                figures["abs, stand-in N(0.80, 0.36), ensemble %"] = found
                continue
            right = accuracies(net, batches(test), samples)
        figures[f"{name}, ensemble %"] = 100 * right.ensemble
        figures[f"{name}, deterministic %"] = 100 * right.deterministic
    return {"figures": figures}


def _stand_in_accuracy(net: nn.Module, test: Images, samples: int) -> float:
    net.eval()
    with torch.no_grad():
        hits = [
            torch.stack([net(x).softmax(1) for _ in range(samples)]).mean(0).argmax(1) == y
            for x, y in batches(test)
        ]
    return 100 * float(torch.cat(hits).float().mean())
