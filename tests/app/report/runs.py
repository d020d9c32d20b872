"""Run directories as `vardrop fit` writes them, made of invented numbers."""

import json
import math

import torch

from vardrop._core.files import with_checksum, write_json, write_tensors

# Named against the alphabet, which is the order in which the arrays come back.
LAYERS = {"stem": (6, 1, 5, 5), "dense": (120, 256)}
RECIPE = {
    "type": "Recipe", "version": 1, "prior": {"type": "LogUniform", "version": 1}, "estimator": None,
    "posterior": {"type": "AdditiveGaussian", "version": 1, "log_sigma2": -8.0},
}  # fmt: skip


def config(name, command, seed=0):
    return {
        "command": command, "net": "lenet5", "method": RECIPE, "seed": seed,
        "versions": {"vardrop": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "classes": [str(digit) for digit in range(10)],
        "data": {"name": name, "md5": "9fb629c4189551a2d022fa330f9573f3"},
        "sizes": {"train": 54000, "validation": 6000, "test": 10000},
    }  # fmt: skip


def history(epochs):
    for epoch in range(epochs):
        fade = math.exp(-epoch / 5)
        yield {
            "epoch": epoch, "beta": min(1.0, epoch / 10), "seconds": 1.5,
            "loss": 0.9 * fade + 0.2, "nll": 0.9 * fade + 0.05, "kl": 9e4 * fade + 2e4,
            "validation": {"nll": 0.8 * fade + 0.07, "accuracy": 0.98 - 0.1 * fade},
            "sparsity": dict.fromkeys(LAYERS, 0.9 * (1 - fade)),
        }  # fmt: skip


def _classes(rows, generator):
    probs = (4 * torch.randn(rows, 10, generator=generator)).softmax(-1)
    return probs, probs.multinomial(1, generator=generator)[:, 0]


def _entropy(probs):
    return -(probs * probs.log()).sum(-1)


def arrays(seed=0, rows=400):
    g = torch.Generator().manual_seed(seed)
    probs, labels = _classes(rows, g)
    other = _entropy(torch.randn(rows, 10, generator=g).softmax(-1))
    return {
        "probs": probs, "labels": labels,
        "entropy_in": _entropy(probs), "entropy_out_fashion-mnist": other,
        "epistemic_in": 0.1 * _entropy(probs), "epistemic_out_fashion-mnist": 0.3 * other,
        "log_prob": probs.gather(1, labels[:, None])[:, 0].log().double(),
    }  # fmt: skip


def results():
    layers = {name: math.prod(shape) for name, shape in LAYERS.items()}
    return {
        "task": "classification", "test_rows": "sha256:1",
        "metrics": {"accuracy": 0.9912, "nll": 0.0312, "ece": 0.0043, "brier": 0.0151},
        "baseline": {"name": "majority", "accuracy": 0.1135, "nll": 2.301, "ece": 0.01, "brier": 0.9},
        "held_out": {
            "net": {"nll": 0.0355, "accuracy": 0.99}, "plain": {"nll": 0.0411, "accuracy": 0.988},
            "majority": {"nll": 2.301, "accuracy": 0.11}, "advice": "",
        },
        "against": {"plain": {"nll": -0.0056, "error": 0.0021}},
        "notes": ["The test part has no row of class 7: averages over classes leave it out."],
        "confusion": [[40 if i == j else int(i + j == 9) for j in range(10)] for i in range(10)],
        "ood": {"fashion-mnist": {"auroc_entropy": 0.981, "auroc_epistemic": 0.979}},
        "layers": [{"name": name, "kind": "Linear", "weights": n} for name, n in layers.items()],
        "compression": {
            "score": "accuracy", "threshold": 3.0, "packed_bytes": 1200,
            "test_score_before": 0.9912, "test_score_after": 0.9904, "weights_before": 30870,
            "weights_after": 470, "macs_before": 60000, "macs_after": 30000,
        },
    }  # fmt: skip


def write(path, *, config, history=(), results=None, arrays=None):
    path.mkdir(parents=True)
    write_json(path / "config.json", with_checksum(config))
    if history:
        lines = (json.dumps(with_checksum(row)) + "\n" for row in history)
        (path / "history.jsonl").write_text("".join(lines))
    if results is not None:
        write_json(path / "results.json", with_checksum(results))
    if arrays is not None:
        write_tensors(path / "arrays.safetensors", arrays)
    return path


def classification(path, name="mnist", seed=0):
    command = f"vardrop fit {name} --net lenet5 --recipe sparse_vd --epochs 30 --out {path.name}"
    found = config(name, command, seed)
    parts = {"history": list(history(30)), "results": results(), "arrays": arrays(seed)}
    return write(path, config=found, **parts)


def regression(path, wide=2):
    g = torch.Generator().manual_seed(0)
    x = torch.rand(200, generator=g) * 6
    mean, spread = x.sin(), 0.1 + 0.1 * x
    y = mean + spread * torch.randn(200, generator=g)
    lower, upper = mean - wide * spread, mean + wide * spread
    band = {"x": x, "y": y, "mean": mean, "lower": lower, "upper": upper}
    scores = {"task": "regression", "metrics": {"rmse": 0.31, "coverage": 0.95}}
    command = "vardrop fit houses.csv --target price --recipe bayes_by_backprop"
    parts = {"history": list(history(5)), "results": scores, "arrays": band}
    found = {**config("houses.csv", command), "classes": []}
    found["data"] = {**found["data"], "target": "price"}
    return write(path, config=found, **parts)
