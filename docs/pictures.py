"""Draw the plots of the theory page and of the README.

python -m docs.pictures [NAME ...]     writes docs/images/NAME.png, and summary.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import nn

import vardrop as vd
from experiments.diagnostics import gradient_variance, permute_variances
from vardrop.app.demo import DECAY, PRUNED, ROWS, STRENGTHS
from vardrop.tuning import train

mpl.use("Agg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREY = "tab:blue", "tab:orange", "tab:gray"


def _axes(columns: int, width: float = 9.0, height: float = 3.2) -> tuple[Any, Any]:
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def _dense(units: int = 100) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.ReLU(), nn.Linear(units, 10))


def _trained(net: nn.Module, data: Any, epochs: int, beta: float = 1.0) -> vd.ELBO:
    """Train a model with a KL warm-up from epoch 5 to 20."""
    elbo = vd.ELBO(net, vd.Categorical(), num_data=len(data.train.x), beta=beta)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=3e-3))
    warmup = vd.linear_warmup(5, 20, beta)
    steps = train(elbo, optimizer, data.train.x, data.train.y, epochs, batch_size=64, beta=warmup)
    for _ in steps:
        pass
    return elbo


def inference() -> Any:
    """Functions sampled from a posterior for data with a gap."""
    torch.manual_seed(1)
    x = torch.cat([torch.linspace(-2, -0.8, 40), torch.linspace(0.8, 2, 40)])[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    vd.convert(net, vd.bayes_by_backprop(prior=vd.Normal(std=1.0), log_sigma2=-6.0))
    elbo = vd.ELBO(net, vd.Gaussian(0.1), num_data=len(x), samples=4)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2))
    for _ in range(2500):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    grid = torch.linspace(-3, 3, 200)[:, None]
    figure, axis = _axes(1, 7)
    for f in vd.draws(net.eval(), 12, seed=0):
        axis.plot(grid, f(grid).detach(), color=BLUE, alpha=0.3, linewidth=0.8)
    p = vd.predict(net, grid, samples=256, draw="functions", likelihood=vd.Gaussian(0.1), seed=0)
    low, high = (p.mean - 2 * p.std)[:, 0], (p.mean + 2 * p.std)[:, 0]
    band = {"color": BLUE, "alpha": 0.15, "label": "± 2 standard deviations"}
    axis.fill_between(grid[:, 0], low, high, **band)
    axis.plot(x, y, ".", color="black", markersize=4, label="data")
    axis.set(ylim=(-3, 3), title="12 functions sampled from q(w)")
    axis.legend(loc="lower right")
    return figure


def kl() -> Any:
    """The KL to the log-uniform prior and its approximations."""
    la = torch.linspace(-8, 4, 400)
    figure, axis = _axes(1, 7)
    forms = vd.functional
    axis.plot(la, forms.log_uniform_kl_of_log(la), color="black", linewidth=2, label="exact")
    axis.plot(la, forms.log_uniform_kl_sigmoid(la), "--", color=BLUE, label="sigmoid (2017)")
    small = la[la <= 1.0]
    axis.plot(small, forms.log_uniform_kl_cubic(small), ":", color=ORANGE, label="cubic (2015)")
    axis.plot(la, nn.functional.softplus(-la) / 2, color="tab:green", label="ARD: ½ log(1 + 1/α)")
    axis.axvline(3, color=GREY, linewidth=0.8)
    axis.text(3.05, 3.2, "pruned", color=GREY)
    axis.set(xlabel="log α", ylabel="KL per weight, nats", ylim=(-0.5, 4.5))
    axis.legend()
    return figure


def local() -> Any:
    """Variance of the gradient by estimator and batch size."""
    torch.manual_seed(0)
    data = vd.load_dataset("digits")
    net = vd.convert(_dense(50), vd.bayes_by_backprop(log_sigma2=-4.0))
    elbo = _trained(net, data, 3)
    figure, axis = _axes(1, 7)
    sizes = (4, 16, 64, 256)
    named = (vd.weight_sample, vd.flipout, vd.per_example, vd.local_reparameterization)
    for estimator in named:
        found = []
        for size in sizes:
            parts = zip(data.train.x.split(size), data.train.y.split(size), strict=True)
            batches = [(x, y) for x, y in parts if len(x) == size]
            values = gradient_variance(
                elbo.net, batches, estimator=estimator, repeats=max(1, size // 8)
            )
            found.append(values["1.weight"].value)
        axis.loglog(sizes, found, "o-", label=type(estimator).__name__)
    axis.set(xlabel="examples in a batch", ylabel="variance of the gradient", xticks=sizes)
    axis.set_xticklabels([str(s) for s in sizes])
    axis.legend()
    return figure


def pruning() -> Any:
    """Means and standard deviations of weights after sparse VD, and their log alpha."""
    torch.manual_seed(0)
    elbo = _trained(vd.convert(_dense(), vd.sparse_vd()), vd.load_dataset("digits"), 60)
    layer = elbo.net[1]
    mean, sigma = layer.weight.detach().flatten().abs(), layer.variance().detach().flatten().sqrt()
    gone = vd.log_alpha(elbo.net)["1"].flatten() > 3
    figure, (left, right) = _axes(2)
    style = {"s": 3, "alpha": 0.5}
    left.scatter(mean[gone], sigma[gone], color=GREY, label="pruned", **style)
    left.scatter(mean[~gone], sigma[~gone], color=BLUE, label="kept", **style)
    line = torch.logspace(-5, 1, 50)
    left.plot(line, line * torch.e**1.5, color="black", linewidth=0.8, label="log α = 3")
    left.set(xscale="log", yscale="log", xlim=(1e-5, 3))
    left.set(xlabel="|mean|", ylabel="standard deviation")
    left.legend(loc="lower right")
    right.hist(vd.log_alpha(elbo.net)["1"].flatten().clamp(-6, 12), 60, color=BLUE)
    right.axvline(3, color="black", linewidth=0.8)
    right.set(xlabel="log α (12: and above)", ylabel="weights of the first layer")
    return figure


def variance() -> Any:
    """Accuracy of a variance network with samples, without them, and with shuffled variances."""
    torch.manual_seed(0)
    data = vd.load_dataset("digits")
    net = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100, bias=False)),
        *(nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 10)),
    )
    _trained(vd.convert(net, vd.variance_layer(), include="3"), data, 30)

    def accuracy(net: nn.Module, samples: int = 64, mode: Any = "sample") -> float:
        p = vd.predict(net, data.test.x, samples, mode=mode, seed=0)
        return (p.probs.argmax(1) == data.test.y).float().mean().item()

    figure, (left, right) = _axes(2)
    numbers = (1, 2, 4, 8, 16, 32, 64)
    left.semilogx(numbers, [accuracy(net, n) for n in numbers], "o-", color=BLUE, base=2)
    left.set(xlabel="samples of the weights", ylabel="test accuracy", ylim=(0.9, 1))
    left.set_xticks(numbers)
    left.set_xticklabels([str(n) for n in numbers])
    shuffled = permute_variances(net, torch.Generator().manual_seed(0))
    scores = [accuracy(net), accuracy(net, mode="mean"), accuracy(shuffled)]
    bars = right.bar(
        ["64 samples", "means", "shuffled\nvariances"], scores, color=[BLUE, GREY, GREY]
    )
    right.bar_label(bars, [f"{score:.1%}" for score in scores])
    right.set(ylim=(0, 1.1), ylabel="test accuracy")
    return figure


def _results(name: str) -> dict[str, Any]:
    text = (Path(__file__).parent.parent / "results" / f"{name}.json").read_text()
    return dict(json.loads(text)["figures"])


def summary() -> Any:
    """The README: the rows of the demo on corrupted digits, and their files.

    Grey text on a transparent background is legible in light and dark mode.
    """
    results, names = _results("demo/digits"), {}
    ink = "#7d8590"
    colors = ("tab:grey", "tab:brown", "tab:purple", "tab:green", "tab:olive", BLUE, ORANGE)
    for name in ROWS:
        names[name] = f"{DECAY} {name}" if name == PRUNED else name.replace("+", "plain +")
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with mpl.rc_context(dict.fromkeys(inked, ink)):
        figure, (top, bottom) = plt.subplots(2, figsize=(4.6, 6.6), layout="constrained")
        for row, color in zip(ROWS, colors, strict=True):
            keys = ["clean NLL", *(f"NLL at strength {s}" for s in STRENGTHS)]
            scores = [results[f"{key}, {row}"] for key in keys]
            means, errors = zip(*((r["mean"], r["standard_error"]) for r in scores), strict=True)
            top.errorbar((0, *STRENGTHS), means, errors, fmt="o-", ms=3, color=color)
            size, quality = (results[f"{key}, {row}"] for key in ("file kB", "corr. acc %"))
            bottom.errorbar(size["mean"], quality["mean"], quality["standard_error"],
                            fmt="o", color=color, label=names[row])  # fmt: skip
        top.set(xlabel="strength of the corruption", ylabel="NLL (lower is better)")
        bottom.set(xscale="log", xlabel="file size in kB", ylabel="accuracy on corrupted digits, %")
        for ax in (top, bottom):
            ax.set_facecolor("none")
            ax.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
        figure.patch.set_alpha(0)
    return figure


PICTURES = {f.__name__: f for f in (inference, kl, local, pruning, variance, summary)}

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        drawn = PICTURES[name]()
        path = IMAGES / f"{name}.{'svg' if name == 'summary' else 'png'}"
        drawn.savefig(path, dpi=120)
        plt.close(drawn)
        print(path)
