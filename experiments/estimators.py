"""Estimators for weights that are used at several positions, on four small classifiers.

Bayes by Backprop is trained with three estimators. Local reparameterization draws fresh noise at
every position of a convolution, a sequence or a recurrence, so its loss is not the ELBO of q(w).
Flipout and one draw per batch draw weights. A model trained with local reparameterization predicts
as it was trained. The other two predict with whole functions (one weight draw for all positions).
Every row chooses its learning rate from the same grid on validation images, with a separate seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments.slim import Part, Seed
from experiments.trainings import Watch, images
from vardrop import metrics
from vardrop.app.data import Images
from vardrop.conversion import convert
from vardrop.estimators import Estimator, flipout, local_reparameterization, weight_sample
from vardrop.functional import random_signs
from vardrop.layers import Linear
from vardrop.likelihoods import Categorical
from vardrop.noisy import has_noise
from vardrop.objective import ELBO, parameter_groups
from vardrop.prediction import predict
from vardrop.priors import Normal
from vardrop.recipes import bayes_by_backprop

_BATCH, _CHOICE_SEED = 100, 100
ROWS: dict[str, Estimator | None] = {
    "plain": None,
    "local reparameterization": local_reparameterization,
    "Flipout": flipout,
    "one draw per batch": weight_sample,
}


class CNN(nn.Module):
    """Two convolutions with max pooling and two dense layers, for images (N, 1, 28, 28)."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(32) if batch_norm else nn.Identity()
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.dense, self.last = nn.Linear(32 * 49, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = self.pool(self.relu(self.norm2(self.conv2(x))))
        return self.last(self.relu(self.dense(x.flatten(1))))


class Encoder(nn.Module):
    """A transformer encoder over the 28 rows of an image, averaged over the rows."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(28, width), nn.Linear(width, 10)
        self.positions = nn.Parameter(0.02 * torch.randn(28, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.embed(x.squeeze(1)) + self.positions).mean(1))


class LSTM(nn.Module):
    """An LSTM over the 28 rows of an image, as two dense layers, which take any estimator.

    `nn.LSTM` always draws its weights once per batch. Here local reparameterization draws at every
    step, and the other estimators use one draw for all steps.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter, self.state = nn.Linear(28, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.enter(x.squeeze(1)).unbind(1)
        hidden = cell = steps[0].new_zeros(len(x), self.state.in_features)
        noise = _noise_of_all_steps(self.state, hidden)
        for step in steps:
            project = self.state(hidden) if noise is None else self.state(hidden, noise)
            write, keep, new, show = (step + project).chunk(4, 1)
            cell = keep.sigmoid() * cell + write.sigmoid() * new.tanh()
            hidden = show.sigmoid() * cell.tanh()
        return self.last(hidden)


def _noise_of_all_steps(layer: nn.Module, x: Tensor) -> Any:
    """The noise that a layer uses at every step, or None for fresh noise or none."""
    if not isinstance(layer, Linear) or not layer.is_sampling:
        return None
    if layer.estimator == local_reparameterization:
        return None
    draw = layer.affine().draw()
    if layer.estimator == weight_sample:
        return draw
    rows = len(x)
    signs = (random_signs((rows, n), x) for n in (layer.in_features, layer.out_features))
    return (draw, *signs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": partial(CNN, batch_norm=False),
    "cnn-batchnorm": partial(CNN, batch_norm=True),
    "encoder": Encoder,
    "lstm": LSTM,
}


def compare_estimators(
    seeds: Sequence[int],
    model: str,
    rates: Sequence[float] = (1e-3, 2e-3, 4e-3),
    examples: int = 4000,
    validated: int = 2000,
    tested: int = 10_000,
    epochs: int = 8,
    beta: float = 0.1,
    log_sigma2: float = -9.0,
    noise_rate: float = 10.0,
    samples: int = 16,
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """Accuracy, NLL, ECE and CPU seconds per training step, by estimator.

    Args:
        seeds: of the trainings, their noise and the order of the images.
        model: a key of `MODELS`.
        rates: learning rates to choose from, by the validation NLL of one run with another seed.
        examples: training images, the first of the set.
        validated: images after them, for the choice.
        tested: test images.
        epochs: of every training.
        beta: weight of the KL.
        log_sigma2: of the noise at the start.
        noise_rate: learning rate of the noise, in learning rates of the weights.
        samples: draws per prediction.
        watch: keeps the results of the trainings.
    """
    data, test = images("fashion-mnist"), images("fashion-mnist", "test", tested)
    train_data = Images(data.x[:examples], data.y[:examples])
    later = slice(examples, examples + validated)
    validation = Images(data.x[later], data.y[later])
    parts = Seed(seeds[0], watch or Watch(), len(ROWS) * (len(rates) + len(seeds)))

    def run(row: str, lr: float, seed: int, held_out: Images) -> Part:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net, estimator = MODELS[model](), ROWS[row]
            if estimator is not None:
                convert(net, bayes_by_backprop(Normal(learned=True), log_sigma2, estimator))
            seconds = train(net, train_data, epochs, lr, beta, noise_rate, seed)
        return {**_scores(net, estimator, samples, held_out), "seconds per step": seconds}

    figures: list[Part] = [{} for _ in seeds]
    for row in ROWS:
        choices = {
            lr: parts.part(f"{row} rate {lr:g}", partial(run, row, lr, _CHOICE_SEED, validation))
            for lr in rates
        }
        lr = min(rates, key=lambda rate: choices[rate]["NLL"])
        for seed, scores in zip(seeds, figures, strict=True):
            result = parts.part(f"{row} seed {seed}", partial(run, row, lr, seed, test))
            scores |= {f"{key}, {row}": value for key, value in result.items()}
            scores[f"learning rate, {row}"] = lr
    return [{"figures": scores} for scores in figures]


def train(
    net: nn.Module, data: Images, epochs: int, lr: float, beta: float, noise_rate: float, seed: int
) -> float:
    """Train with Adam, with rates that fall to zero on a half cosine; CPU seconds per step."""
    elbo = ELBO(net, Categorical(), len(data.x), beta if has_noise(net) else 0.0)
    groups = parameter_groups(elbo, lr, noise_lr=noise_rate * lr)
    optimizer = torch.optim.Adam(groups)
    steps = epochs * -(-len(data.x) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    elbo.train()
    start = time.process_time()
    for _ in range(epochs):
        for rows in torch.randperm(len(data.x), generator=generator).split(_BATCH):
            optimizer.zero_grad()
            elbo(data.x[rows], data.y[rows]).loss.backward()
            optimizer.step()
            schedule.step()
    seconds = (time.process_time() - start) / steps
    net.eval()
    return seconds


def _scores(net: nn.Module, estimator: Estimator | None, samples: int, data: Images) -> Part:
    batches, start = data.x.split(500), time.process_time()
    if estimator is None:
        prediction = predict(net, batches, 1, mode="mean", seed=0)
    else:
        draw: Literal["estimator", "functions"] = "functions"
        if estimator == local_reparameterization:
            draw = "estimator"
        prediction = predict(net, batches, samples, draw=draw, seed=0, keep=0)
    seconds = time.process_time() - start
    return {
        "accuracy": 100 * float(metrics.accuracy(prediction.probs, data.y)),
        "NLL": float(metrics.nll_from_log_probs(prediction.log_probs, data.y)),
        "ECE": float(metrics.ece(prediction.probs, data.y)),
        "prediction seconds": seconds,
    }
