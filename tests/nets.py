"""Small nets that several tests share, and the comparison of their tensors."""

import contextlib
import copy

import numpy as np
import torch
from torch import nn

import vardrop as vd


def is_same_state(one, other):
    """Whether two modules, or their states, have equal tensors of the same names."""
    one, other = (v.state_dict() if isinstance(v, nn.Module) else v for v in (one, other))
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def is_equal(a, b):
    """Whether two structures hold equal numbers and tensors; NaN is equal to NaN."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, torch.Tensor | np.ndarray):
        a, b = np.asarray(a), np.asarray(b)
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return repr(a) == repr(b)


@contextlib.contextmanager
def assert_unchanged(net):
    """Nothing in the block changes a tensor of the net, or a mode."""
    state, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    try:
        yield
    finally:
        assert is_same_state(net, state)
        assert [m.training for m in net.modules()] == modes


class Parts(nn.Module):
    """Modules by name, and `run(net, *inputs)`, what is computed with them."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


class Named(Parts):
    """Parts whose inputs may also be given by name."""

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


def digits():
    """The small digits that come with scikit-learn, as rows."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float() / 16, torch.from_numpy(y)


def reload(net, into, folder):
    """What the file of a noisy net gives back."""
    vd.save_noisy(net, folder / "net")
    return vd.load_noisy(folder / "net", into=into)


class Tied(nn.Module):
    """An embedding and a decoder, with one weight where they are tied."""

    def __init__(self, tie=True):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
        if tie:
            self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(self.embedding(x))
