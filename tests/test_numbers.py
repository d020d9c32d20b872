"""Stored numbers of twelve models for fixed seeds: a change of the mechanism must not move them.

`python -m tests.test_numbers` prints how far each case is from the stored one; with `--write` it
stores them anew.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.layers.test_goldens import projections
from tests.nets import Parts

FILE = Path(__file__).with_name("numbers.json")


class Cnn(nn.Module):
    """A class with `forward`: BatchNorm, max pool, in-place ReLU, a residual connection."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.hidden, self.last = nn.Linear(6 * 16, 20), nn.Linear(20, 3)

    def forward(self, x):
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = self.relu(self.norm2(self.conv2(x)) + x)
        return self.last(self.relu(self.hidden(x.flatten(1))))


def sequence():
    run = lambda net, x: net.last(net.recurrent(x.flatten(1).unflatten(1, (8, 8)))[0][:, -1])
    return Parts(run, recurrent=nn.LSTM(8, 6, batch_first=True), last=nn.Linear(6, 3))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 3))


CASES = {
    "sparse_vd mlp": (mlp, vd.sparse_vd()), "sparse_vd cnn": (Cnn, vd.sparse_vd()),
    "ard mlp": (mlp, vd.ard()),
    "bayes_by_backprop cnn": (Cnn, vd.bayes_by_backprop(vd.Normal(learned=True))),
    "flipout cnn": (Cnn, vd.bayes_by_backprop(estimator=vd.flipout)),
    "variational_dropout a mlp": (mlp, vd.variational_dropout("A")),
    "variational_dropout b cnn": (Cnn, vd.variational_dropout("B")),
    "mc_dropout mlp": (mlp, vd.mc_dropout(0.2)), "beta_bernoulli cnn": (Cnn, vd.beta_bernoulli()),
    "structured_pruning mlp": (mlp, vd.structured_pruning()), "dropmax cnn": (Cnn, vd.dropmax()),
    "bayes_by_backprop lstm": (sequence, vd.bayes_by_backprop()),
}  # fmt: skip


def numbers(name):
    make, recipe = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, y = torch.randn(24, 1, 8, 8), torch.arange(24) % 3
        net = vd.convert(make(), recipe)
        elbo = vd.ELBO(net, vd.Categorical(), 240)
        found = trained(elbo, x, y)
    net.eval()
    found["mean"] = projections(vd.predict(elbo, x, mode="mean").probs)
    found["estimator"] = projections(vd.predict(elbo, x, samples=9, seed=1).probs)
    found["frozen"] = projections(vd.freeze(elbo, samples=9)(x, seed=1).probs)
    if name.split()[0] in ("sparse_vd", "ard", "bayes_by_backprop") and "lstm" not in name:
        found["functions"] = projections(vd.predict(elbo, x, 5, seed=1, draw="functions").probs)
    if name.split()[0] in ("sparse_vd", "ard", "beta_bernoulli", "structured_pruning"):
        found |= smaller(net, x)
    return found


def trained(elbo, x, y):
    """Loss, KL and gradients of three steps."""
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2, noise_lr=0.5))
    found = {}
    for step in range(3):
        out = elbo(x, y)
        optimizer.zero_grad()
        out.loss.backward()
        grads = torch.cat([p.grad.flatten() for p in elbo.parameters() if p.grad is not None])
        found[f"step {step}"] = [float(out.loss.detach()), float(out.kl.detach())]
        found[f"step {step}"] += projections(grads)
        optimizer.step()
    return found


def smaller(net, x):
    """How much of the net is left with every second hidden unit dead, and its bytes."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name in ("1.weight", "hidden.weight"):
                weight[::2] *= 1e-6
    small, _ = shrunk = vd.shrink(net, x)
    with tempfile.TemporaryDirectory() as folder:
        report = vd.pack(shrunk, Path(folder) / "net.vdp")
    parameters = [sum(p.numel() for p in small.parameters())]
    return {"parameters": parameters, "shrunken": projections(small(x)), "bytes": [report.bytes]}


def farthest(stored, found):
    """The largest relative difference of two sets of numbers."""
    assert stored.keys() == found.keys()
    pairs = [p for key in stored for p in zip(stored[key], found[key], strict=True)]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-3) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_numbers_for_a_seed_stay(name):
    # float32 sums in another order, on another processor
    assert farthest(json.loads(FILE.read_text())[name], numbers(name)) < 2e-4


if __name__ == "__main__":
    all_numbers = {name: numbers(name) for name in CASES}
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(all_numbers, indent=1) + "\n")
    for name, stored in json.loads(FILE.read_text()).items():
        print(f"{farthest(stored, all_numbers[name]):.1e}  {name}")
