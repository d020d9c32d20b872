"""Exploration on CartPole: a variance layer in the policy against an entropy bonus.

Needs gymnasium (the extra `rl`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from vardrop.conversion import convert
from vardrop.noisy import sampling
from vardrop.recipes import variance_layer

Explorer = Literal["variance", "entropy"]


def policy(explorer: Explorer) -> nn.Sequential:
    """A net 4-64-64-2; its middle layer is a variance layer where that is the explorer."""
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return convert(net, variance_layer(), where="2") if explorer == "variance" else net


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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = policy(explorer)
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=5e-3)
        weight = entropy_weight if explorer == "entropy" else 0.0
        for episode in range(episodes):
            log_probs, entropies, total = _play(env, net, explorer, seed * episodes + episode)
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


def _play(env: Any, net: nn.Module, explorer: Explorer, seed: int) -> tuple[Tensor, Tensor, float]:
    if explorer == "entropy":
        return play(env, net, seed)
    with sampling(net):
        return play(env, net, seed)
