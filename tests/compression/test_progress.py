"""Long verbs show a progress line, and Ctrl-C leaves the model unchanged."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import accuracy


class Counting(nn.Module):
    """A model that is interrupted in one of its passes, which copies of it count together."""

    passes, stop = 0, None

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, x):
        Counting.passes += 1
        if Counting.passes == Counting.stop:
            raise KeyboardInterrupt
        return self.layers(x) + self.shift


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
VERBS = {
    "shrink": lambda net, **options: vd.shrink(net, X, **options),
    "choose_threshold": lambda net, **options: vd.choose_threshold(
        net, (X, Y), accuracy, macs=100, points=3, **options
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_leaves_the_model_unchanged(verb, monkeypatch):
    net = vd.convert(Counting(), vd.sparse_vd()).train()
    state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    flags = [(m.training, dict(m._forward_hooks)) for m in net.modules()]
    monkeypatch.setattr(Counting, "passes", 0)
    VERBS[verb](net)
    total = Counting.passes
    for stop in {1, 2, total // 4, total // 2, total - 1, total}:
        monkeypatch.setattr(Counting, "passes", 0)
        monkeypatch.setattr(Counting, "stop", stop)
        with pytest.raises(KeyboardInterrupt):
            VERBS[verb](net)
        assert all(torch.equal(state[key], tensor) for key, tensor in net.state_dict().items())
        assert flags == [(m.training, dict(m._forward_hooks)) for m in net.modules()]
        assert all(m.sampling is None for m in net.modules() if isinstance(m, vd.noisy.Noisy))
    monkeypatch.setattr(Counting, "stop", None)
    VERBS[verb](net)


@pytest.mark.parametrize("verb", VERBS)
def test_progress_is_shown_on_request(verb, capsys):
    net = vd.convert(Counting(), vd.sparse_vd())
    VERBS[verb](net)
    VERBS[verb](net, progress=False)
    assert not capsys.readouterr().err
    VERBS[verb](net, progress=True)
    assert capsys.readouterr().err.startswith(f"\r{verb}: 1")
