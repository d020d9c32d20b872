"""Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks": the runs of its tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.adversarial import attack_curves
from experiments.exploration import cartpole
from experiments.toys import four_gaussians, regression_band
from experiments.variance import (
    DENSE1,
    HIDDEN,
    Parameterisation,
    batches,
    lenet5_variance,
    run_parameterisation,
    small_net,
)
from experiments.watch import Watch
from vardrop.conversion import convert, to_variance
from vardrop.data import Images, load_images
from vardrop.diagnostics import accuracies
from vardrop.metrics import accuracy
from vardrop.objective import ELBO, Categorical
from vardrop.posteriors import Noise
from vardrop.prediction import predict
from vardrop.prediction.selective import measure
from vardrop.priors import ARD, LogUniform, Prior, StudentT
from vardrop.recipes import variance_layer
from vardrop.training import Loop


def _mnist(examples: int, tests: int = 10_000) -> tuple[Images, Images]:
    """The first training and test images."""
    data, test = load_images("mnist"), load_images("mnist", "test")
    return Images(data.x[:examples], data.y[:examples]), Images(test.x[:tests], test.y[:tests])


def variance_lenet5(
    seed: int, noise: Noise = "gaussian", layers: tuple[str, ...] = (DENSE1,), epochs: int = 12,
    samples: int = 100, examples: int = 60_000, tests: int = 10_000, watch: Watch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Accuracy by one draw, by the mean weights (which are zero) and by an ensemble."""
    data, test = _mnist(examples, tests)
    _, found = lenet5_variance(data, test, noise, tuple(layers), epochs, samples, seed, watch)
    return {
        "figures": {
            "one draw, %": 100 * found.sample,
            "deterministic, %": 100 * found.deterministic,
            "ensemble, %": 100 * found.ensemble,
        }
    }


PRIORS: dict[str, Prior] = {
    "log-uniform": LogUniform(),
    "ard": ARD(),
    "student-t": StudentT(1.0, 0.1, form="bound"),
}


def parameterisation(
    seed: int, kind: Parameterisation = "layer", prior: str = "log-uniform", samples: int = 50,
    examples: int = 60_000, tests: int = 10_000, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """ELBO and accuracies, how they came about, and what is left without the means."""
    data, test = _mnist(examples, tests)
    run = run_parameterisation(kind, data, test, PRIORS[prior], seed=seed, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = accuracies(run.net, batches(test), samples)
        swap = to_variance(run.net)
        after = accuracies(run.net, batches(test), samples)
    figures = {
        "ELBO, nats": run.elbo,
        "deterministic, %": 100 * before.deterministic,
        "one draw, %": 100 * before.sample,
        "ensemble, %": 100 * before.ensemble,
        "ensemble without means, %": 100 * after.ensemble,
        "KL to the net without means, nats": swap.total,
    }
    curve = [
        {"sixths of the training": i + 1, "alpha above exp(3), %": 100 * t.above,
         "deterministic, %": 100 * t.accuracies.deterministic,
         "ensemble, %": 100 * t.accuracies.ensemble}
        for i, t in enumerate(run.log)
    ]  # fmt: skip
    return {"figures": figures, "curve": curve}


def selective_propagation(
    seed: int, epochs: int = 10, samples: int = 50, examples: int = 60_000, tests: int = 10_000,
    shares: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    watch: Watch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Accuracy where only the weights of the largest |kappa| are drawn, the others their mean."""
    data, test = _mnist(examples, tests)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = convert(small_net(784, 100, 100), variance_layer(), where=HIDDEN)
        elbo = ELBO(net, Categorical(), len(data.x), beta=0.0)
        parameters = [p for p in net.parameters() if p.requires_grad]
        loop = Loop(
            elbo, torch.optim.Adam(parameters, lr=1e-3), *data, epochs, batch_size=200, seed=seed,
            rate=lambda e: 1 - e / epochs,
        )  # fmt: skip
        (watch or Watch()).fit("variance net", loop, share=0.7)
        net.eval()
        kappa = measure(net, data.x[:2000], "categorical", 0.0)
        sizes = torch.cat([k.abs().flatten() for k in kappa.values()]).sort().values
        curve = []
        for share in shares:
            right = _right(net, test, _threshold(sizes, share), kappa, samples, seed)
            curve.append({"share of sampled weights": share, "accuracy, %": 100 * right})
    figures = {
        f"{100 * r['share of sampled weights']:g} % sampled, accuracy, %": r["accuracy, %"]
        for r in curve
    }
    return {"figures": figures, "curve": curve}


def _threshold(sizes: Tensor, share: float) -> float:
    """The size that `share` of the weights exceed."""
    drop = round((1 - share) * len(sizes))
    return 0.0 if drop == 0 else float(sizes[drop - 1])


def _right(
    net: nn.Module,
    test: Images,
    threshold: float,
    kappa: dict[str, Tensor],
    samples: int,
    seed: int,
) -> float:
    found = predict(
        net, test.x.split(1000), samples, mode="selective", threshold=threshold, kappa=kappa,
        seed=seed, keep=0,
    )  # fmt: skip
    return float(accuracy(found.probs, test.y))


def attacks(
    seed: int, epochs: int = 10, samples: int = 10, examples: int = 60_000, tests: int = 10_000,
    epsilons: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
) -> dict[str, Any]:  # fmt: skip
    """Accuracy under the fast gradient sign method, of a dropout net and of a variance net."""
    data, test = _mnist(examples, tests)
    curves = attack_curves(data, test, tuple(epsilons), epochs, samples, seed)
    curve = [
        {"net": net, "epsilon": epsilon, "accuracy, %": 100 * right}
        for net, rights in curves.items()
        for epsilon, right in zip(epsilons, rights, strict=True)
    ]
    figures = {f"{r['net']}, epsilon {r['epsilon']:g}, %": r["accuracy, %"] for r in curve}
    return {"figures": figures, "curve": curve}


def exploration(seed: int, episodes: int = 500, window: int = 50) -> dict[str, Any]:
    """CartPole: return at the end and on the way, by noise in the policy or an entropy bonus."""
    figures, curve = {}, []
    for explorer in ("variance", "entropy"):
        returns = torch.tensor(cartpole(explorer, episodes, seed=seed))  # type: ignore[arg-type]
        means = returns.unfold(0, window, window).mean(1).tolist()
        curve += [
            {"explorer": explorer, "episode": (i + 1) * window, "mean return": mean}
            for i, mean in enumerate(means)
        ]
        figures[f"return of the first {window}, {explorer}"] = means[0]
        figures[f"return of the last {window}, {explorer}"] = means[-1]
        figures[f"return of all, {explorer}"] = float(returns.mean())
    return {"figures": figures, "curve": curve}


def variance_toys(seed: int, steps: int = 2000) -> dict[str, Any]:
    """Four Gaussians told by variances alone, and a regression whose band widens."""
    _, found = four_gaussians(steps, seed=seed)
    band = regression_band(steps, seed=seed)
    inside, width = band.x.abs() <= 1, band.high - band.low
    wrong = (band.mean - torch.sin(3 * band.x))[inside].square().mean().sqrt()
    figures = {
        "four Gaussians, deterministic, %": 100 * found.deterministic,
        "four Gaussians, one draw, %": 100 * found.sample,
        "four Gaussians, ensemble, %": 100 * found.ensemble,
        "regression, error of the mean": float(wrong),
        "regression, band outside / inside": float(width[~inside].mean() / width[inside].mean()),
    }
    names = ("x", "mean", "low", "high")
    points = zip(*(t.tolist() for t in band), strict=True)
    return {"figures": figures, "curve": [dict(zip(names, p, strict=True)) for p in points]}
