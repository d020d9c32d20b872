"""Variance networks: layers without means, the four parameterisations, the swap.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks: when expectation does not meet
your expectations".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vardrop.conversion import convert
from vardrop.data import Images
from vardrop.diagnostics.transition import Accuracies, accuracies
from vardrop.experiments.nets import lenet5_batchnorm
from vardrop.objective import ELBO, Categorical
from vardrop.posteriors import Noise
from vardrop.recipes import variance_layer
from vardrop.training import train

Parameterisation = Literal["layer", "neuron", "weight", "additive"]
DENSE1 = "9"  # the last hidden layer of `lenet5_batchnorm`


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
) -> tuple[nn.Module, Accuracies]:
    """LeNet-5 with variance layers: Adam 1e-3 falling linearly to 0, batches of 200."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = lenet5_batchnorm()
        convert(net, variance_layer(noise), where=list(layers))
        elbo = ELBO(net, Categorical(), num_data=len(data.x))
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-3)
        for _ in train(
            elbo, optimizer, *data, epochs, batch_size=200,
            rate=lambda epoch: 1 - epoch / epochs, seed=seed,
        ):  # fmt: skip
            pass
        return net, accuracies(net, batches(test), samples)
