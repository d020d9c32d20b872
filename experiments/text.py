"""Text: a character language model with an LSTM; a small transformer that loses heads and units.

Texts lie in the folder `text` of VARDROP_DATA: tiny Shakespeare (Karpathy 2015) and SST-2 (Socher
et al. 2013), packed with gzip.
"""

from __future__ import annotations

import copy
import gzip
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.trainings import Watch, error
from vardrop._core.errors import VardropError
from vardrop.app.data import data_directory
from vardrop.compression import shrink
from vardrop.conversion import convert
from vardrop.gates import Gate
from vardrop.likelihoods import Categorical
from vardrop.noisy import has_noise, log_alpha, noisy_weights
from vardrop.objective import ELBO, linear_warmup, parameter_groups
from vardrop.objective.schedules import Schedule
from vardrop.recipes import l0, recurrent_dropout, sparse_vd
from vardrop.recipes.recipe import Recipe
from vardrop.tuning import Epoch, Loop, latencies

_THRESHOLD = 3.0  # on log alpha
_STREAMS = 40  # into which a held-out text is cut; each begins with an empty state


def read_text(file: str) -> str:
    """A packed text of VARDROP_DATA."""
    path = (data_directory() or Path()) / "text" / f"{file}.gz"
    if not path.is_file():
        raise VardropError(
            f"Expected the file {path}, but it is not there. Set VARDROP_DATA to the directory "
            f"that holds text/{file}.gz."
        )
    return gzip.decompress(path.read_bytes()).decode()


class Characters(nn.Module):
    """The logits (N, T, C) of the next character, after each of (N, T)."""

    def __init__(self, classes: int, width: int, embedded: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedded)
        self.lstm = nn.LSTM(embedded, width, batch_first=True)
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.embedding(x))[0])


class Parts(NamedTuple):
    """A text as codes: the first nine tenths, and two halves of the last one."""

    train: Tensor
    validation: Tensor
    test: Tensor
    classes: int


def characters(text: str) -> Parts:
    """The codes of a text, by the order of its characters."""
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[c] for c in text])
    first, second = int(0.9 * len(codes)), int(0.95 * len(codes))
    return Parts(codes[:first], codes[first:second], codes[second:], len(alphabet))


def windows(codes: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Sequences (N, length) that cover a text, and the characters that come next."""
    count = (len(codes) - 1) // length
    used = count * length
    return codes[:used].view(count, length), codes[1 : used + 1].view(count, length)


@torch.no_grad()
def bits(net: nn.Module, codes: Tensor) -> float:
    """Bits per character of a held-out text, by the means of the weights."""
    x, y = windows(codes, (len(codes) - 1) // _STREAMS)
    output = net.eval()(x)
    return float(functional.cross_entropy(output.flatten(0, 1), y.flatten())) / math.log(2)


@torch.no_grad()
def prune(net: nn.Module) -> float:
    """Zero the weights over the threshold; the part of them that went, in per cent."""
    gone = total = 0
    alphas = log_alpha(net)
    for name, _, tensor in noisy_weights(net):
        keep = alphas[name] < _THRESHOLD
        tensor.mean.mul_(keep)
        gone, total = gone + int((~keep).sum()), total + keep.numel()
    return 100 * gone / total


def character_lstm(
    seed: int,
    width: int = 256,
    length: int = 100,
    epochs: int = 10,
    batch: int = 32,
    lr: float = 4e-3,
    drop_rate: float = 0.1,
    warmup: tuple[int, int] = (1, 5),
    noise_lr: float = 2e-2,
    log_sigma2: float = -8.0,
    letters: int | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Bits per character of tiny Shakespeare: plain, dropout by sequence, sparse VD.

    One schedule for all: Adam, the learning rate falls linearly to 0. The KL of sparse VD is
    weighted by `warmup` in epochs.
    """
    text = characters(read_text("tinyshakespeare.txt")[:letters])
    x, y = windows(text.train, length)
    watch, figures, curve = watch or Watch(), {}, []
    recipes: dict[str, Recipe | None] = {
        "plain": None,
        "dropout": recurrent_dropout(drop_rate),
        "sparse VD": sparse_vd(log_sigma2),
    }
    for name, recipe in recipes.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net: nn.Module = Characters(text.classes, width)
            net = net if recipe is None else convert(net, recipe)
            sparse = name == "sparse VD"
            elbo = ELBO(net, Categorical(class_axis=-1), len(x), float(sparse), kl_value_every=10)
            beta = linear_warmup(*warmup) if sparse else None
            loop = falling(elbo, (x, y), epochs, batch, (lr, noise_lr), beta, seed)
            curve += watch.fit(name, loop, _measured(name, net, text, length), 1 / len(recipes))
        figures[f"bits on validation, {name}"] = bits(net, text.validation)
        if sparse:
            figures["bits, sparse VD before pruning"] = bits(net, text.test)
            figures["sparsity, sparse VD, %"] = prune(net)
        figures[f"bits, {name}"] = bits(net, text.test)
    return {"figures": figures, "curve": curve}


def falling(
    elbo: ELBO,
    data: tuple[Tensor, Tensor],
    epochs: int,
    batch: int,
    rates: tuple[float, float],
    beta: Schedule | None,
    seed: int,
) -> Loop:
    """A training by Adam; the learning rates, of weights and of noise, fall linearly to 0."""
    optimizer = torch.optim.Adam(parameter_groups(elbo, *rates), fused=True)
    fall = linear_warmup(0, epochs)
    return Loop(elbo, optimizer, *data, epochs, batch, beta, lambda e: 1 - fall(e), seed)


def _measured(name: str, net: nn.Module, text: Parts, length: int) -> Any:
    def measure(epoch: Epoch) -> dict[str, Any]:
        found = {"training": epoch.nll / length / math.log(2), "bits": bits(net, text.validation)}
        return {"way": name, "epoch": epoch.epoch, **found}

    return measure


class Sentences(nn.Module):
    """Two classes of sentences (N, T) of words, 0 for padding: a transformer and a mean."""

    def __init__(
        self, words: int, length: int, width: int, heads: int, feed: int, layers: int, drop: float
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, feed, drop, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.dropout, self.last = nn.Dropout(drop), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x == 0
        y = self.dropout(self.words(x) + self.places)
        y = self.encoder(y, src_key_padding_mask=hidden)
        keep = (~hidden).unsqueeze(-1).to(y.dtype)
        return self.last(self.dropout((y * keep).sum(1) / keep.sum(1)))


class Reviews(NamedTuple):
    """Words (N, T) and classes (N,) of three parts, and the number of words."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    words: int


def reviews(length: int, examples: int | None) -> Reviews:
    """SST-2 by the words that stand twice or more in its training part; others are word 1."""
    raw = [read_text(f"sst2.{part}").splitlines()[:examples] for part in ("train", "dev", "test")]
    pairs = [[(line[2:].split()[:length], int(line[0])) for line in part] for part in raw]
    counts = Counter(word for sentence, _ in pairs[0] for word in sentence)
    known = {w: i + 2 for i, w in enumerate(sorted(w for w, n in counts.items() if n > 1))}

    def coded(part: list[tuple[list[str], int]]) -> tuple[Tensor, Tensor]:
        rows = [[known.get(w, 1) for w in s] + [0] * (length - len(s)) for s, _ in part]
        return torch.tensor(rows), torch.tensor([y for _, y in part])

    train, validation, test = map(coded, pairs)
    return Reviews(train, validation, test, len(known) + 2)


def accuracy(net: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    """In per cent."""
    return 100 - error(net, *pair)


class _Small(NamedTuple):
    """A net without the heads and units that went, and how many are left of each, in per cent."""

    net: nn.Module
    validation: float
    heads: float
    units: float


class _Training(NamedTuple):
    """How the nets of one seed are trained."""

    data: Reviews
    seed: int
    batch: int
    lr: float
    gate_lr: float
    watch: Watch
    fraction: float

    def fit(self, name: str, net: nn.Module, epochs: int) -> nn.Module:
        """Adam, the learning rate falling to 0; with gates, their penalty rises for half of it."""
        noisy = has_noise(net)
        torch.manual_seed(self.seed)
        elbo = ELBO(net, Categorical(), len(self.data.train[0]), float(noisy))
        beta = linear_warmup(0, epochs / 2) if noisy else None
        rates = self.lr, self.gate_lr
        loop = falling(elbo, self.data.train, epochs, self.batch, rates, beta, self.seed)
        self.watch.fit(name, loop, fraction=self.fraction)
        return net.eval()

    def gated(self, start: nn.Module, penalty: float, epochs: int) -> _Small:
        """A copy with gates on heads and feed-forward units, trained on and made smaller."""
        net = convert(copy.deepcopy(start), l0(penalty), include=["*self_attn", "*linear2"])
        net = self.fit(f"gates {penalty:g}", net, epochs)
        left = [_left(net, kind) for kind in ("self_attn", "linear2")]
        small = shrink(net, self.data.validation[0][:16]).net
        return _Small(small, accuracy(small, self.data.validation), *left)


def smaller_transformer(
    seed: int,
    width: int = 64,
    heads: int = 8,
    feed: int = 256,
    layers: int = 2,
    length: int = 40,
    drop: float = 0.3,
    epochs: int = 8,
    gate_epochs: int = 8,
    batch: int = 32,
    lr: float = 1e-3,
    gate_lr: float = 5e-2,
    penalties: Sequence[float] = (0.03, 0.1, 0.3),
    timed: Sequence[int] = (64, 1),
    examples: int | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """SST-2: accuracy, heads, feed-forward units and latency before and after.

    A plain net is trained, then trained on for as many epochs with and without gates. The strongest
    penalty whose net is at most half a point worse on validation data than the plain net, trained
    on, is tested; the best one where there is none. Latencies are of batches of `timed` sentences.
    """
    data = reviews(length, examples)
    fraction = 1 / (2 + len(penalties))
    training = _Training(data, seed, batch, lr, gate_lr, watch or Watch(), fraction)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Sentences(data.words, length, width, heads, feed, layers, drop)
        start = training.fit("plain", net, epochs)
        plain = training.fit("trained on", copy.deepcopy(start), gate_epochs)
        found = {p: training.gated(start, p, gate_epochs) for p in penalties}
    figures, smaller = _figures(start, plain, found, data)
    for rows in timed:
        nets = {"before": plain, "after": smaller}
        times = latencies(nets, (data.test[0][:rows],), ("torch",))["torch"]
        figures |= {f"ms {when}, {rows} sentences": 1000 * t for when, t in times.items()}
        figures[f"times faster, {rows} sentences"] = times["before"] / times["after"]
    return {"figures": figures}


def _left(net: nn.Module, kind: str) -> float:
    """Units of the gates of a kind of layer that are open, in per cent."""
    gates = [m for name, m in net.named_modules() if isinstance(m, Gate) and kind in name]
    kept = [r.kept for gate in gates if (r := gate.relevance()) is not None]
    return 100 * float(torch.cat(kept).double().mean())


def _figures(
    start: nn.Module, plain: nn.Module, found: dict[float, _Small], data: Reviews
) -> tuple[dict[str, float], nn.Module]:
    """The figures of all nets, and the one that validation data choose."""
    held = accuracy(plain, data.validation)
    enough = [p for p, small in found.items() if small.validation >= held - 0.5]
    best = max(enough) if enough else max(found, key=lambda p: found[p].validation)
    chosen = found[best]
    figures = {
        "accuracy, trained net": accuracy(start, data.test),
        "accuracy, trained on": accuracy(plain, data.test),
        "accuracy, smaller": accuracy(chosen.net, data.test),
        "heads left, %": chosen.heads,
        "feed-forward units left, %": chosen.units,
        "weights left in the encoder, %": 100 * _weights(chosen.net) / _weights(plain),
        "penalty": best,
    }
    figures["accuracy, smaller over trained on"] = (
        figures["accuracy, smaller"] - figures["accuracy, trained on"]
    )
    for penalty, small in found.items():
        figures[f"accuracy on validation, penalty {penalty:g}"] = small.validation
        figures[f"heads left, penalty {penalty:g}, %"] = small.heads
        figures[f"feed-forward units left, penalty {penalty:g}, %"] = small.units
    return figures | {"accuracy on validation, trained on": held}, chosen.net


def _weights(net: nn.Module) -> int:
    return sum(p.numel() for p in net.get_submodule("encoder").parameters())
