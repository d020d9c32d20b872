"""Attack curves: accuracy under the fast gradient sign method, by the mean and by ensembles."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.variance import HIDDEN, small_net
from vardrop.conversion import convert
from vardrop.data import Images
from vardrop.diagnostics.passes import evaluating
from vardrop.errors import VardropError
from vardrop.noisy import sampling
from vardrop.objective import ELBO, Categorical
from vardrop.recipes import Recipe, binary_dropout, variance_layer
from vardrop.training import train


def log_probabilities(net: nn.Module, x: Tensor, samples: int) -> Tensor:
    """log of the averaged probabilities of `samples` draws, or of the mean weights for 0."""
    if samples == 0:
        with sampling(net, on=False):
            return torch.log_softmax(net(x), -1)
    with sampling(net):
        draws = torch.stack([torch.log_softmax(net(x), -1) for _ in range(samples)])
    return draws.logsumexp(0) - torch.log(torch.tensor(float(samples)))


def fgsm(net: nn.Module, x: Tensor, y: Tensor, epsilon: float, samples: int = 10) -> Tensor:
    """x + epsilon sign(d loss / dx), kept in [0, 1], against an ensemble (0: the mean weights).

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 2), vd.sparse_vd()).eval()
    >>> x = torch.full((1, 2), 0.5)
    >>> (fgsm(net, x, torch.tensor([0]), 0.1, samples=0) - x).abs()
    tensor([[0.1000, 0.1000]])

    Goodfellow, Shlens & Szegedy 2015, "Explaining and harnessing adversarial examples", sec. 4.
    """
    if epsilon < 0:
        raise VardropError(f"Expected `epsilon` to be at least 0, but got {epsilon}.")
    x = x.detach().requires_grad_()
    loss = functional.nll_loss(log_probabilities(net, x, samples), y)
    (gradient,) = torch.autograd.grad(loss, x)
    return (x + epsilon * gradient.sign()).detach().clamp(0, 1)


def attack_curve(
    net: nn.Module, images: Images, epsilons: tuple[float, ...], samples: int = 10
) -> list[float]:
    """Accuracy at each strength; the attacker sees draws of its own, the defender fresh ones."""
    accuracy = []
    with evaluating(net):
        for epsilon in epsilons:
            attacked = fgsm(net, images.x, images.y, epsilon, samples)
            with torch.no_grad():
                guess = log_probabilities(net, attacked, samples).argmax(-1)
            accuracy.append((guess == images.y).double().mean().item())
    return accuracy


def attack_curves(
    data: Images,
    test: Images,
    epsilons: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2),
    epochs: int = 5,
    samples: int = 10,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Curves of a dropout net by its mean and by an ensemble, and of a variance net."""
    curves = {}
    methods: dict[str, Recipe] = {"dropout": binary_dropout(0.5), "variance": variance_layer()}
    with torch.random.fork_rng():
        for name, recipe in methods.items():
            torch.manual_seed(seed)
            net = convert(small_net(data.x[0].numel(), 300, 300), recipe, where=HIDDEN)
            elbo = ELBO(net, Categorical(), num_data=len(data.x))
            optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-3)
            for _ in train(elbo, optimizer, *data, epochs, seed=seed):
                pass
            if name == "dropout":
                curves["dropout, mean"] = attack_curve(net, test, epsilons, samples=0)
            curves[f"{name}, ensemble"] = attack_curve(net, test, epsilons, samples)
    return curves
