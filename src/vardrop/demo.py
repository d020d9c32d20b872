"""The demo: a plain net and its sparse twin on scikit-learn's digits, side by side."""

from __future__ import annotations

import copy

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from vardrop import metrics
from vardrop.conversion import convert
from vardrop.noisy import log_alpha
from vardrop.objective import ELBO, Categorical, linear_warmup, parameter_groups
from vardrop.recipes import sparse_vd
from vardrop.training import train

EPOCHS, THRESHOLD = 120, 3.0


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, rest = order[:360], order[360:]
    return x[rest], y[rest], x[test], y[test]


def _prune(net: nn.Module) -> tuple[int, int]:
    """Zero the means whose log alpha is over the threshold; weights left and in all."""
    left = total = 0
    for name, la in log_alpha(net).items():
        keep = la < THRESHOLD
        with torch.no_grad():
            net.get_submodule(name).weight.mul_(keep)  # type: ignore[operator, union-attr]
        left, total = left + int(keep.sum()), total + keep.numel()
    return left, total


def main(seed: int = 0) -> Table:
    """Train both nets and print accuracy, NLL, ECE and the weights that are left."""
    x, y, test_x, test_y = _digits()
    table = Table(title="scikit-learn digits, 1437 training and 360 test images of 8 x 8")
    for column in ("net", "accuracy", "NLL", "ECE", "weights left"):
        table.add_column(column, justify="left" if column == "net" else "right")
    with torch.random.fork_rng(), Progress() as progress:
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        sparse = convert(copy.deepcopy(plain), sparse_vd())
        weights = sum(m.weight.numel() for m in plain if isinstance(m, nn.Linear))
        for name, net, beta in (("plain", plain, 0.0), ("sparse VD", sparse, 1.0)):
            task = progress.add_task(name, total=EPOCHS)
            elbo = ELBO(net, Categorical(), num_data=len(x), beta=beta)
            optimizer = torch.optim.Adam(parameter_groups(elbo, lr=5e-3))
            warmup = linear_warmup(10, 60) if beta else None
            rate = lambda epoch: min(1.0, 2 - 2 * epoch / EPOCHS)  # noqa: E731
            for _ in train(elbo, optimizer, x, y, EPOCHS, batch_size=64, beta=warmup, rate=rate):
                progress.advance(task)
            left, total = (weights, weights) if net is plain else _prune(net)
            with torch.no_grad():
                probs = net.eval()(test_x).softmax(-1)
            scores = (f(probs, test_y).item() for f in (metrics.accuracy, metrics.nll, metrics.ece))
            accuracy, nll, ece = scores
            share = f"{left} of {total} ({left / total:.1%})"
            table.add_row(name, f"{accuracy:.1%}", f"{nll:.3f}", f"{ece:.3f}", share)
    Console().print(table)
    return table


if __name__ == "__main__":
    main()
