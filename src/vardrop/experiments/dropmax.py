"""DropMax and its baselines on MNIST-1K: the first 100 training images of each class.

    python -m vardrop.experiments.dropmax /tmp/dropmax.json softmax dropmax

Lee et al. 2018, "DropMax: adaptive variational softmax", table 1 (other base net: softmax 7.09 %,
DropMax 5.32 %). The recipe is that of the authors' code: LeNet 20-50-500, Adam at 1e-3, 1e-4 and
1e-5 by thirds of 200 epochs, batches of 100, weight decay 1e-4 except on the head's branches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vardrop.conversion import convert
from vardrop.data import Images, load_images
from vardrop.experiments.nets import lenet5
from vardrop.metrics import ece
from vardrop.objective import ELBO, Categorical, parameter_groups
from vardrop.recipes import (
    Recipe,
    class_dropout,
    deterministic_attention,
    dropmax,
    sampled_softmax,
    softmax,
    sparsemax,
)
from vardrop.training import train

METHODS: dict[str, Callable[[], Recipe]] = {
    "softmax": softmax,
    "dropmax": dropmax,
    "sampled_softmax": sampled_softmax,
    "class_dropout": class_dropout,
    "deterministic_attention": deterministic_attention,
    "dropmax_prior": lambda: dropmax(inference="p"),
    "sparsemax": sparsemax,
}


def first_of_each_class(images: Images, count: int, skip: int = 0) -> Images:
    """`count` images of every class in file order, after the first `skip` of it."""
    rows = [torch.nonzero(images.y == k).flatten()[skip : skip + count] for k in images.y.unique()]
    index = torch.cat(rows).sort().values
    return Images(images.x[index], images.y[index])


def scores(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    """Error in per cent, NLL in nats, expected calibration error in per cent."""
    wrong = (log_probs.argmax(1) != y).float().mean()
    nll = torch.nn.functional.nll_loss(log_probs, y)
    return {
        "error": 100 * wrong.item(),
        "nll": nll.item(),
        "ece": 100 * ece(log_probs.exp(), y).item(),
    }


def run(method: str, seed: int, data: Images, test: Images, epochs: int = 200) -> dict[str, float]:
    """Train one head on one seed and measure it on the test set, once, after the last epoch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = lenet5()
        convert(net, METHODS[method](), where="9")
        elbo = ELBO(net, Categorical(), num_data=len(data.x))
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, weight_decay=1e-4))

        def rate(epoch: float) -> float:
            return 0.1 ** int(3 * epoch / epochs)

        for _ in train(elbo, optimizer, *data, epochs, rate=rate, seed=seed):
            pass
        net.eval()
        with torch.no_grad():
            log_probs = torch.cat([net(x) for x in test.x.split(1000)])
    return {"train_nll": _final_nll(elbo, data), **scores(log_probs, test.y)}


@torch.no_grad()
def _final_nll(elbo: ELBO, data: Images) -> float:
    return float(Categorical()(elbo.net(data.x), data.y))


def mnist_1k(path: Path, methods: list[str], seeds: int = 3) -> dict[str, dict[str, float]]:
    """Every method and seed; what `path` holds already is not run again."""
    done: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
    data = first_of_each_class(load_images("mnist"), 100)
    test = load_images("mnist", "test")
    for seed in range(seeds):
        for method in methods:
            if (key := f"{method}/{seed}") in done:
                continue
            done[key] = run(method, seed, data, test)
            path.write_text(json.dumps(done, indent=1))
            print(key, done[key], flush=True)
    return done


if __name__ == "__main__":
    mnist_1k(Path(sys.argv[1]), sys.argv[2:] or list(METHODS))
