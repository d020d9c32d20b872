"""Beta-Bernoulli dropout on LeNet-500-300 and MNIST: pretrain, then gates; then dependent gates.

    python -m vardrop.experiments.beta_bernoulli /tmp/bb

Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
dropout": 294-110-71 units and 1.33 % error after 200 dense and 200 gated epochs. The authors'
recipe: batches of 100, pixels in [0, 1], Adam; dense 1e-3 with weight decay 1e-4; gates 1e-2 and
weights 1e-3 with weight decay 1e-4, all times 0.1 at 50 % and 80 % of the epochs. Here the two
stages are shorter.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.conversion import convert
from vardrop.data import Images, load_images
from vardrop.experiments.nets import mlp
from vardrop.noisy import relevance
from vardrop.objective import ELBO, Categorical, parameter_groups
from vardrop.recipes import beta_bernoulli
from vardrop.training import train


@dataclasses.dataclass(frozen=True)
class Setting:
    """The two stages; the gates' learning rate sets the trade-off of sparsity and accuracy."""

    dense_epochs: int = 15
    gate_epochs: int = 45
    gate_lr: float = 5e-2
    seed: int = 0


def error(net: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Share of wrong answers in per cent."""
    net.eval()
    with torch.no_grad():
        guess = torch.cat([net(x).argmax(1) for x in data[0].split(2000)])
    return 100 * (guess != data[1]).float().mean().item()


def pretrain(setting: Setting, data: Images) -> nn.Module:
    """The dense net, whose learning rate falls linearly to zero."""
    net = mlp(784, 500, 300, 10)
    elbo = ELBO(net, Categorical(), num_data=len(data.x), beta=0.0)
    optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, weight_decay=1e-4), fused=True)
    epochs = setting.dense_epochs
    for step in train(elbo, optimizer, *data, epochs, rate=lambda e: 1 - e / epochs):
        print("dense", step, flush=True)
    return net


def sparsify(setting: Setting, net: nn.Module, data: Images) -> list[dict[str, Any]]:
    """Gates on a trained net; the units that are open after each epoch."""
    convert(net, beta_bernoulli())
    elbo = ELBO(net, Categorical(), num_data=len(data.x))
    groups = parameter_groups(elbo, lr=1e-3, noise_lr=setting.gate_lr, weight_decay=1e-4)
    optimizer = torch.optim.Adam(groups, fused=True)
    epochs, curve = setting.gate_epochs, []

    def rate(epoch: float) -> float:
        return 0.1 ** ((epoch >= 0.5 * epochs) + (epoch >= 0.8 * epochs))

    for step in train(elbo, optimizer, *data, epochs, rate=rate):
        units = [int(r.kept.sum()) for r in relevance(net).values()]
        curve.append({"epoch": step.epoch, "nll": step.nll, "kl": step.kl, "units": units})
        print(json.dumps(curve[-1]), flush=True)
    return curve


def run(directory: Path, setting: Setting) -> dict[str, Any]:
    """Both stages and their test errors; a dense net in `directory` is not trained again."""
    directory.mkdir(parents=True, exist_ok=True)
    data, test = load_images("mnist"), load_images("mnist", "test")
    checkpoint = directory / f"dense-{setting.dense_epochs}-{setting.seed}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        net: nn.Module = mlp(784, 500, 300, 10)
        if checkpoint.is_file():
            net.load_state_dict(torch.load(checkpoint, weights_only=True))
        else:
            net = pretrain(setting, data)
            torch.save(net.state_dict(), checkpoint)
        dense = error(net, test)
        curve = sparsify(setting, net, data)
    result = {
        "setting": dataclasses.asdict(setting),
        "dense_error": dense,
        "error": error(net, test),
        "units": curve[-1]["units"],
        "curve": curve,
    }
    (directory / "result.json").write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    print(run(Path(sys.argv[1]), Setting()))
