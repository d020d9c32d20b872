"""Variance networks: layers without means, the four parameterisations, the swap, permutations.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks: when expectation does not meet
your expectations".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.nets import lenet5_batchnorm
from experiments.watch import Watch
from vardrop.conversion import Where, convert
from vardrop.data import Images
from vardrop.diagnostics import (
    Accuracies,
    PermutationTest,
    Transition,
    accuracies,
    permutation_test,
    transition,
)
from vardrop.diagnostics.passes import evaluating
from vardrop.noisy import kl, sampling
from vardrop.objective import ELBO, Categorical, parameter_groups
from vardrop.posteriors import AdditiveGaussian, MultiplicativeGaussian, Noise, Posterior
from vardrop.priors import LogUniform, Prior
from vardrop.recipes import Recipe, bayes_by_backprop, sparse_vd, variance_layer
from vardrop.training import Loop, train

Parameterisation = Literal["layer", "neuron", "weight", "additive"]
DENSE1 = "9"  # the last hidden layer of `lenet5_batchnorm`
HIDDEN = "4"  # the second hidden layer of `small_net`

LOG_UNIFORM = LogUniform()
PARAMETERISATIONS: dict[Parameterisation, Posterior] = {
    "layer": MultiplicativeGaussian(math.exp(-5), per="layer"),
    "neuron": MultiplicativeGaussian(math.exp(-5), per="output"),
    "weight": MultiplicativeGaussian(math.exp(-5), per="weight"),
    "additive": AdditiveGaussian(-10.0),
}


def batches(images: Images, size: int = 1000) -> list[tuple[Tensor, Tensor]]:
    """Image batches in order, for evaluation."""
    return list(zip(images.x.split(size), images.y.split(size), strict=True))


def lenet5_variance(
    data: Images,
    test: Images,
    noise: Noise = "gaussian",
    layers: tuple[str, ...] = (DENSE1,),
    epochs: int = 8,
    samples: int = 20,
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[nn.Module, Accuracies]:
    """LeNet-5 with variance layers: Adam 1e-3 falling linearly to 0, batches of 200."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = lenet5_batchnorm()
        convert(net, variance_layer(noise), where=list(layers))
        elbo = ELBO(net, Categorical(), num_data=len(data.x))
        learned = [p for p in net.parameters() if p.requires_grad]
        loop = Loop(
            elbo, torch.optim.Adam(learned, lr=1e-3, fused=True), *data, epochs, batch_size=200,
            rate=lambda epoch: 1 - epoch / epochs, seed=seed,
        )  # fmt: skip
        (watch or Watch()).fit("variance net", loop, share=0.8)
        return net, accuracies(net, batches(test), samples)


def small_net(inputs: int, bottleneck: int, width: int, classes: int = 10) -> nn.Sequential:
    """inputs-bottleneck-width-classes with BatchNorm; the few inputs of the middle average little.

    A mean drowns where alpha exceeds the number of inputs that it is averaged over.
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, bottleneck, bias=False),
        nn.BatchNorm1d(bottleneck), nn.ReLU(),
        nn.Linear(bottleneck, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, classes),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Run:
    """A trained net, its ELBO on the training set, and its way there."""

    net: nn.Module
    elbo: float
    log: list[Transition]


def run_parameterisation(
    name: Parameterisation,
    data: Images,
    test: Images,
    prior: Prior = LOG_UNIFORM,
    bottleneck: int = 100,
    width: int = 1000,
    epochs: int = 60,
    batch_size: int = 200,
    noise_lr: float = 4e-3,
    samples: int = 20,
    seed: int = 0,
    net: str = "small",
) -> Run:
    """Variational dropout on the middle of `small_net`, log alpha from -5; logged six times.

    With `net="lenet5"` it is on the last hidden layer of `lenet5_batchnorm` instead.

    The source trains for 200 epochs with one rate; here the noise has four times the rate of the
    means (1e-3), so that log alpha can travel as far in fewer epochs.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, where = small_net(data.x[0].numel(), bottleneck, width), HIDDEN
        if net == "lenet5":
            model, where = lenet5_batchnorm(), DENSE1
        convert(model, Recipe(PARAMETERISATIONS[name], prior), where=where)
        elbo = ELBO(model, Categorical(), num_data=len(data.x))
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, noise_lr=noise_lr), fused=True)
        log = []
        for epoch in train(
            elbo, optimizer, *data, epochs, batch_size,
            rate=lambda e: min(1.0, 2 * (1 - e / epochs)), seed=seed,
        ):  # fmt: skip
            if (epoch.epoch + 1) % math.ceil(epochs / 6) == 0 or epoch.epoch == epochs - 1:
                log.append(transition(model, batches(test), samples))
        return Run(model, _elbo(model, data, 5), log)


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


def permutation_drops(
    data: Images, test: Images, epochs: int = 20, samples: int = 10, seed: int = 0
) -> dict[str, PermutationTest]:
    """Ensemble accuracy before and after permuting variances, of three methods.

    Sparse VD and Bayes by Backprop with noise in every layer; a variance layer in the middle.
    """
    methods: dict[str, tuple[Recipe, Where | None]] = {
        "sparse_vd": (sparse_vd(), None),
        "bayes_by_backprop": (bayes_by_backprop(), None),
        "variance": (variance_layer(), HIDDEN),
    }
    found = {}
    for name, (recipe, where) in methods.items():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = convert(small_net(data.x[0].numel(), 100, 100), recipe, where)
            elbo = ELBO(net, Categorical(), num_data=len(data.x))
            optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3))
            for _ in train(elbo, optimizer, *data, epochs, seed=seed):
                pass
            found[name] = permutation_test(
                net,
                lambda net: accuracies(net, batches(test), samples).ensemble,
                generator=torch.Generator().manual_seed(seed),
            )
    return found
