"""Variance layers at work: two toy problems, exploration on CartPole, attacks on digits.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks" (the toys: sec. 3).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.diagnostics import Accuracies, accuracies
from experiments.neklyudov import HIDDEN, small_net
from experiments.trainings import Watch, images, learned
from vardrop._core.errors import VardropError
from vardrop._core.modules import evaluating
from vardrop.app.data import Images
from vardrop.conversion import convert
from vardrop.noisy import sampling
from vardrop.objective import ELBO, Categorical, Gaussian
from vardrop.recipes import Recipe, binary_dropout, variance_layer
from vardrop.tuning import Loop


def gaussians(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` points of each of four unit Gaussians at (3 or 10, 3 or 10), and their classes."""
    centres = torch.cartesian_prod(torch.tensor([3.0, 10.0]), torch.tensor([3.0, 10.0]))
    y = torch.arange(4).repeat_interleave(count)
    return centres[y] + torch.randn(4 * count, 2, generator=generator), y


def four_gaussians(
    steps: int = 2000, samples: int = 101, seed: int = 0, watch: Watch | None = None
) -> Accuracies:
    """Test accuracies of a classifier of four Gaussians through a variance layer of two units.

    The two units have mean zero, so a class can be told by their variances alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(2, 100), nn.LeakyReLU()]
        for _ in range(3):
            layers += [nn.Linear(100, 100), nn.LeakyReLU()]
        bottleneck = convert(nn.Linear(100, 2, bias=False), variance_layer())
        layers += [bottleneck, nn.LeakyReLU(), nn.Linear(2, 100), nn.LeakyReLU(), nn.Linear(100, 4)]
        net = nn.Sequential(*layers)
        generator = torch.Generator().manual_seed(seed)
        x, y = gaussians(100, generator)
        elbo = ELBO(net, Categorical(), num_data=len(x))
        optimizer = torch.optim.Adam(learned(net), lr=1e-3)
        loop = Loop(elbo, optimizer, x, y, steps, batch_size=len(x), seed=seed)
        (watch or Watch()).fit("four Gaussians", loop, fraction=0.5)
        return accuracies(net, [gaussians(250, generator)], samples)


class Band(NamedTuple):
    """A prediction over a grid of inputs: mean of the draws and their 5 % and 95 % quantiles."""

    x: Tensor
    mean: Tensor
    low: Tensor
    high: Tensor


def regression_band(
    steps: int = 2000,
    samples: int = 500,
    noise_std: float = 0.1,
    seed: int = 0,
    watch: Watch | None = None,
) -> Band:
    """Fit y = sin(3 x) + noise on [-1, 1] with a variance layer, and predict on [-2, 2]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 200), nn.ReLU())
        net.append(nn.Linear(200, 1))
        convert(net, variance_layer(), include="2")
        x = torch.rand(200, 1) * 2 - 1
        y = torch.sin(3 * x) + noise_std * torch.randn_like(x)
        elbo = ELBO(net, Gaussian(noise_std, learned=True), num_data=len(x))
        optimizer = torch.optim.Adam(learned(elbo), lr=3e-3)

        def rate(step: float) -> float:
            return 1 - step / steps

        loop = Loop(elbo, optimizer, x, y, steps, batch_size=len(x), rate=rate, seed=seed)
        (watch or Watch()).fit("regression", loop, fraction=0.5)
        grid = torch.linspace(-2, 2, 81)
        with torch.no_grad(), sampling(net.eval()):
            draws = torch.stack([net(grid[:, None]).squeeze(1) for _ in range(samples)])
        low, high = draws.quantile(torch.tensor([0.05, 0.95]), dim=0)
        return Band(grid, draws.mean(0), low, high)


def variance_toys(seed: int, steps: int = 2000, watch: Watch | None = None) -> dict[str, Any]:
    """Four Gaussians told by variances alone, and a regression whose band widens."""
    watch = watch or Watch()
    found = four_gaussians(steps, seed=seed, watch=watch)
    band = regression_band(steps, seed=seed, watch=watch)
    inside, width = band.x.abs() <= 1, band.high - band.low
    wrong = (band.mean - torch.sin(3 * band.x))[inside].square().mean().sqrt()
    figures = {
        "four Gaussians, deterministic, %": 100 * found.deterministic,
        "four Gaussians, one draw, %": 100 * found.sample,
        "four Gaussians, ensemble, %": 100 * found.ensemble,
        "regression, error of the mean": float(wrong),
        "regression, band outside / inside": float(width[~inside].mean() / width[inside].mean()),
    }
    points = zip(*(t.tolist() for t in band), strict=True)
    return {"figures": figures, "curve": [dict(zip(Band._fields, p, strict=True)) for p in points]}


Explorer = Literal["variance", "entropy"]


def policy(explorer: Explorer) -> nn.Sequential:
    """A net 4-64-64-2; its middle layer is a variance layer where that is the explorer."""
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return convert(net, variance_layer(), include="2") if explorer == "variance" else net


def play(env: Any, net: nn.Module, seed: int) -> tuple[Tensor, Tensor, float]:
    """One episode with actions drawn from the policy; (log-probabilities, entropies, return)."""
    state, _ = env.reset(seed=seed)
    log_probs, entropies, total, done = [], [], 0.0, False
    while not done:
        choice = torch.distributions.Categorical(logits=net(torch.as_tensor(state)[None]))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        entropies.append(choice.entropy())
        state, reward, terminated, truncated, _ = env.step(int(action))
        total, done = total + float(reward), terminated or truncated
    return torch.cat(log_probs), torch.cat(entropies), total


def cartpole(
    explorer: Explorer = "variance",
    episodes: int = 300,
    entropy_weight: float = 0.01,
    discount: float = 0.99,
    seed: int = 0,
) -> list[float]:
    """REINFORCE with normalised returns-to-go; the return of every episode.

    The noise of a variance layer is drawn at every step and the gradient goes through the same
    draw; the other policy explores by its softmax and an entropy bonus.
    """
    import gymnasium  # the extra `rl`

    env = gymnasium.make("CartPole-v1")
    returns = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = policy(explorer).train()
        optimizer = torch.optim.Adam(learned(net), lr=5e-3)
        weight = entropy_weight if explorer == "entropy" else 0.0
        for episode in range(episodes):
            log_probs, entropies, total = play(env, net, seed * episodes + episode)
            steps = torch.arange(len(log_probs) - 1, -1, -1)
            to_go = (1 - discount ** (steps + 1)) / (1 - discount)  # every step is worth 1
            advantage = (to_go - to_go.mean()) / (to_go.std() + 1e-6)
            loss = -(log_probs * advantage).sum() - weight * entropies.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            returns.append(total)
    env.close()
    return returns


def exploration(seed: int, episodes: int = 500, window: int = 50) -> dict[str, Any]:
    """CartPole: return at the end and on the way, by noise in the policy or an entropy bonus."""
    figures, curve = {}, []
    explorers: tuple[Explorer, ...] = ("variance", "entropy")
    for explorer in explorers:
        returns = torch.tensor(cartpole(explorer, episodes, seed=seed))
        means = returns.unfold(0, window, window).mean(1).tolist()
        curve += [
            {"explorer": explorer, "episode": (i + 1) * window, "mean return": mean}
            for i, mean in enumerate(means)
        ]
        figures[f"return of the first {window}, {explorer}"] = means[0]
        figures[f"return of the last {window}, {explorer}"] = means[-1]
        figures[f"return of all, {explorer}"] = float(returns.mean())
    return {"figures": figures, "curve": curve}


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
    net: nn.Module, data: Images, epsilons: tuple[float, ...], samples: int = 10
) -> list[float]:
    """Accuracy at each strength; the attacker sees draws of its own, the defender fresh ones."""
    accuracy = []
    with evaluating(net):
        for epsilon in epsilons:
            attacked = fgsm(net, data.x, data.y, epsilon, samples)
            with torch.no_grad():
                guess = log_probabilities(net, attacked, samples).argmax(-1)
            accuracy.append((guess == data.y).double().mean().item())
    return accuracy


def attack_curves(
    data: Images,
    test: Images,
    epsilons: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2),
    epochs: int = 5,
    samples: int = 10,
    seed: int = 0,
    watch: Watch | None = None,
) -> dict[str, list[float]]:
    """Curves of a dropout net by its mean and by an ensemble, and of a variance net."""
    curves, watch = {}, watch or Watch()
    methods: dict[str, Recipe] = {"dropout": binary_dropout(0.5), "variance": variance_layer()}
    for name, recipe in methods.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = convert(small_net(data.x[0].numel(), 300, 300), recipe, include=HIDDEN)
            elbo = ELBO(net, Categorical(), num_data=len(data.x))
            optimizer = torch.optim.Adam(learned(net), lr=1e-3)
            loop = Loop(elbo, optimizer, *data, epochs, seed=seed)
            watch.fit(name, loop, fraction=0.4)
            if name == "dropout":
                curves["dropout, mean"] = attack_curve(net, test, epsilons, samples=0)
            curves[f"{name}, ensemble"] = attack_curve(net, test, epsilons, samples)
    return curves


def attacks(
    seed: int,
    epochs: int = 10,
    samples: int = 10,
    examples: int = 60_000,
    tests: int = 10_000,
    epsilons: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Accuracy under the fast gradient sign method, of a dropout net and of a variance net."""
    data, test = images("mnist", count=examples), images("mnist", "test", tests)
    curves = attack_curves(data, test, tuple(epsilons), epochs, samples, seed, watch)
    curve = [
        {"net": net, "epsilon": epsilon, "accuracy, %": 100 * right}
        for net, rights in curves.items()
        for epsilon, right in zip(epsilons, rights, strict=True)
    ]
    figures = {f"{r['net']}, epsilon {r['epsilon']:g}, %": r["accuracy, %"] for r in curve}
    return {"figures": figures, "curve": curve}
