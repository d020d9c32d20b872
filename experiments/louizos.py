"""Sparse variational dropout on the LeNets, shrunk and packed: bytes on disk and seconds a pass.

The threshold and the precision are chosen on images held out of the training data; the test set is
looked at once, at the end.

Louizos, Ullrich & Welling 2017, "Bayesian compression for deep learning".
Molchanov, Ashukha & Vetrov 2017, "Variational dropout sparsifies deep neural networks", sec. 5.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from experiments.trainings import NETS, Record, Watch, error, images, small_weights
from vardrop.app.data import Images
from vardrop.compression import (
    PackReport,
    Shrunk,
    Threshold,
    choose_threshold,
    pack,
    shrink,
    unpack,
)
from vardrop.compression.probes import score, time_interleaved
from vardrop.conversion import convert
from vardrop.export import export_onnx
from vardrop.noisy import log_alpha
from vardrop.objective import ELBO, Categorical, linear_warmup, parameter_groups
from vardrop.posteriors import MultiplicativeGaussian
from vardrop.priors import LogUniform
from vardrop.recipes import Recipe, sparse_vd
from vardrop.tuning import Epoch, Loop, fine_tune

Knots = Sequence[Sequence[float]]  # (epoch, factor on the learning rate), linear in between
_LR = 1e-3


@dataclasses.dataclass(frozen=True)
class Split:
    """MNIST minus its mean image; `validation` comes from the end of the training data."""

    train: Images
    validation: Images
    test: Images
    mean: Tensor


def accuracy(output: Tensor, target: Tensor) -> float:
    """The fraction of examples whose largest output is at the target class."""
    return float((output.argmax(1) == target).double().mean())


def load_split(validation: int, examples: int) -> Split:
    """The data of a run; the mean is that of all images before the validation data."""
    (x, y), (test_x, test_y) = images("mnist"), images("mnist", "test")
    n = len(x) - validation
    mean = x[:n].mean(0)
    train = Images(x[:n][:examples] - mean, y[:n][:examples])
    return Split(train, Images(x[n:] - mean, y[n:]), Images(test_x - mean, test_y), mean)


def packed_bytes(
    seed: int,
    net: str = "lenet300",
    knots: Knots = ((0, 1.0), (100, 1.0), (125, 0.75), (145, 0.0)),
    warmup: tuple[int, int] = (5, 20),
    max_drop: float = 0.002,
    examples: int = 55_000,
    validation: int = 5000,
    latency: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train, choose the threshold, shrink, pack; bytes on disk and the error of what they hold.

    With `latency` also the seconds of a pass, and what is left of each layer.
    """
    split = load_split(validation, examples)
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as directory:
        model = _fresh(net, seed)
        loop = _loop(model, split, knots, seed, warmup)
        curve = (watch or Watch()).fit("sparse VD", loop, _measure(model, split))
        model.eval()
        chosen, shrunk = _shrunk(model, split, max_drop)
        found = _figures(model, shrunk, net, split, Path(directory) / "net.vdp")
        if latency:
            found |= _details(shrunk.net, chosen, net, split, Path(directory))
            found["figures"] |= _speed_ups(found["latency"])
    return found | {"curve": curve}


def fewer_channels(
    seed: int,
    knots: Knots = ((0, 1.0), (4, 1.0), (10, 0.0)),
    channel_knots: Knots = ((0, 1.0), (6, 1.0), (10, 0.0)),
    warmup: tuple[int, int] = (1, 4),
    max_drops: tuple[float, float] = (0.002, 0.005),
    fine_tune_epochs: int = 5,
    examples: int = 55_000,
    validation: int = 5000,
    latency: bool = False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """LeNet-5 by sparse VD, then with one alpha for each input channel of the second convolution.

    Noise on single weights leaves nearly every channel something to do. One alpha for each input
    channel of the second convolution takes whole channels out of the first. What is left is trained
    for a few epochs.
    """
    split, watch = load_split(validation, examples), watch or Watch()
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as directory:
        model = _fresh("lenet5", seed)
        first = _loop(model, split, knots, seed, warmup)
        curve = _named("weights", watch.fit("weights", first, _measure(model, split), 0.5))
        model = _shrunk(model.eval(), split, max_drops[0])[1].net.train()
        # "3*", since a layer that drops inputs stands as 3.1 after its `Select`.
        convert(model, Recipe(MultiplicativeGaussian(0.02, "input"), LogUniform()), include="3*")
        convert(model, sparse_vd(), exclude="3*")
        torch.manual_seed(seed)
        second = _loop(model, split, channel_knots, seed, noise_rate=10.0)
        curve += _named("channels", watch.fit("channels", second, _measure(model, split), 0.5))
        chosen, shrunk = _shrunk(model.eval(), split, max_drops[1])
        _fine_tune(shrunk.net, split.train, fine_tune_epochs, seed)
        found = _figures(model, shrunk, "lenet5", split, Path(directory) / "net.vdp")
        if latency:
            found |= _details(shrunk.net, chosen, "lenet5", split, Path(directory))
            found["figures"] |= _speed_ups(found["latency"])
    return found | {"curve": curve}


def _fresh(net: str, seed: int) -> nn.Module:
    """The noisy net before training, and the generator of the noise at its seed."""
    torch.manual_seed(seed)
    model = convert(small_weights(NETS[net]()), sparse_vd())
    torch.manual_seed(seed)
    return model


def _loop(
    model: nn.Module,
    split: Split,
    knots: Knots,
    seed: int,
    warmup: tuple[int, int] | None = None,
    noise_rate: float = 1.0,
) -> Loop:
    elbo = ELBO(model, Categorical(), len(split.train.x), kl_value_every=10)
    groups = parameter_groups(elbo, _LR, _LR * noise_rate)
    return Loop(
        elbo,
        torch.optim.Adam(groups, fused=True),
        *split.train,
        int(knots[-1][0]),
        beta=linear_warmup(*warmup) if warmup else None,
        rate=partial(rate_factor, knots),
        seed=seed,
    )


def rate_factor(knots: Knots, epoch: float) -> float:
    """The factor on the learning rate in an epoch: linear between the knots."""
    for (a, start), (b, end) in pairwise(knots):
        if a <= epoch < b:
            return start + (end - start) * (epoch - a) / (b - a)
    return knots[-1][1]


def _measure(model: nn.Module, split: Split) -> Callable[[Epoch], Record]:
    """What to record after an epoch, with the validation error of weights of log alpha < 3."""

    def measure(epoch: Epoch) -> Record:
        weights: dict[str, Any] = {n: model.get_submodule(n).weight for n in log_alpha(model)}
        kept = {name: la < 3 for name, la in log_alpha(model).items()}
        before = {name: w.detach().clone() for name, w in weights.items()}
        with torch.no_grad():
            for name, w in weights.items():
                w.mul_(kept[name])
            wrong = error(model, *split.validation)
            for name, w in weights.items():
                w.copy_(before[name])
        left = sum(int(k.sum()) for k in kept.values())
        return {
            "nll": epoch.nll,
            "kl": epoch.kl,
            "validation_error": wrong,
            "times fewer weights": sum(k.numel() for k in kept.values()) / max(left, 1),
        }

    return measure


def _named(training: str, curve: list[Record]) -> list[Record]:
    return [{"training": training, **record} for record in curve]


def _shrunk(model: nn.Module, split: Split, max_drop: float) -> tuple[Threshold, Shrunk]:
    chosen = choose_threshold(model, split.validation, accuracy, max_drop=max_drop, points=61)
    return chosen, shrink(model, split.test.x[:1], chosen, drop_inputs=True)


def _fine_tune(small: nn.Module, data: Images, epochs: int, seed: int) -> None:
    """Train the weights that are left, shuffled by the seed, the rate falling to 0."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(small.parameters(), lr=_LR)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = _LR * (1 - epoch / epochs)
        order = torch.randperm(len(data.x), generator=generator).split(100)
        shuffled = [(data.x[b], data.y[b]) for b in order]
        fine_tune(small, shuffled, nn.functional.cross_entropy, optimizer)


def _figures(
    model: nn.Module, shrunk: Shrunk, net: str, split: Split, path: Path
) -> dict[str, Any]:
    small = shrunk.net
    decoded, report = _packed(shrunk, NETS[net], split, path)
    full = NETS[net]()
    size = sum(4 * p.numel() for p in full.parameters())
    figures = {
        "error of the trained net, %": error(model, *split.test),
        "error of the small net, %": error(small, *split.test),
        "error of the file, %": error(decoded, *split.test),
        "times fewer weights": _weights(full) / max(_weights(small), 1),
        "bytes": float(report.bytes),
        "times fewer bytes": size / report.bytes,
    }
    return {"figures": figures}


def _packed(
    shrunk: Shrunk, fresh: Callable[[], nn.Module], split: Split, path: Path
) -> tuple[nn.Module, PackReport]:
    """The coarsest steps that cost at most 0.1 points of validation accuracy."""
    best, before = None, score(shrunk.net, split.validation, accuracy)
    for tolerance in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        report, decoded = pack(shrunk, path, tolerance), unpack(path, into=fresh())
        if best is None or before - score(decoded, split.validation, accuracy) <= 0.001:
            best = decoded, report
    assert best is not None
    return best


def _weights(net: nn.Module) -> int:
    return sum(int(p.count_nonzero()) for p in net.parameters() if p.dim() > 1)


def _details(
    small: nn.Module,
    chosen: Threshold,
    net: str,
    split: Split,
    directory: Path,
) -> dict[str, Any]:
    """Layer by layer what is left, the best seconds of a pass, and the sweep of thresholds."""
    # Dead means are denormal numbers, which are slow: time a dense net with fresh weights instead.
    full, x = NETS[net]().eval(), split.test.x
    files = {"dense": directory / "dense.onnx", "small": directory / "small.onnx"}
    export_onnx(full, x[:1], files["dense"])
    export_onnx(small, x[:1], files["small"])
    return {
        "layers": {"dense": _layers(full), "small": _layers(small)},
        "latency": {
            str(b): _latencies({"dense": full, "small": small}, files, x[:b]) for b in (256, 1)
        },
        "threshold": float(chosen),
        "sweep": [dataclasses.asdict(point) for point in chosen.points],
    }


def _layers(net: nn.Module) -> dict[str, dict[str, int]]:
    return {
        name.removesuffix(".weight"): {
            "weights": int(p.count_nonzero()),
            "inputs": p.shape[1],
            "outputs": p.shape[0],
        }
        for name, p in net.named_parameters()
        if p.dim() > 1
    }


def _latencies(nets: dict[str, nn.Module], onnx: dict[str, Path], x: Tensor) -> dict[str, float]:
    """Best seconds of each net in torch and of each file in onnxruntime, one thread, in turns."""
    import onnxruntime  # the extra `compress`

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    calls: dict[str, Callable[[], Any]] = {n: partial(net.eval(), x) for n, net in nets.items()}
    for name, path in onnx.items():
        session = onnxruntime.InferenceSession(path, options)
        feed = {session.get_inputs()[0].name: x.numpy()}
        calls[f"onnx {name}"] = partial(session.run, None, feed)
    with torch.inference_mode():
        return time_interleaved(calls, rounds=20)


def _speed_ups(latency: dict[str, dict[str, float]]) -> dict[str, float]:
    times = latency["256"]
    return {
        "times faster in torch, batches of 256": times["dense"] / times["small"],
        "times faster in onnxruntime, batches of 256": times["onnx dense"] / times["onnx small"],
    }
