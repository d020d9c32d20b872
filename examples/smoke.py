"""The whole path on a small model: import, train, predict, shrink, save, pack, export.

`python examples/smoke.py` needs vardrop and its extra "compress"; `--core` needs torch alone.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import vardrop as vd


class Cnn(nn.Module):
    """A class with `forward`: BatchNorm, max pool and in-place ReLU."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.hidden, self.last = nn.Linear(96, 20), nn.Linear(20, 3)

    def forward(self, x):
        x = self.pool(self.relu(self.norm(self.conv(x))))
        return self.last(self.relu(self.hidden(x.flatten(1))))


def train():
    """A trained noisy CNN and its images."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 3
    elbo = vd.ELBO(vd.convert(Cnn(), vd.sparse_vd()), vd.Categorical(), num_data=64)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2))
    for _ in range(5):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    elbo.eval()
    return elbo, x


def check_core(elbo, x):
    """What needs torch alone."""
    probs = vd.predict(elbo, x, samples=8, seed=0).probs
    assert probs.shape == (64, 3)
    assert bool((probs.sum(1) - 1).abs().max() < 1e-5)
    assert vd.predict(elbo, x, samples=4, draw="functions").probs.shape == (64, 3)
    assert vd.freeze(elbo, samples=4)(x, seed=0).probs.shape == (64, 3)
    compiled = torch.compile(elbo, backend="aot_eager", fullgraph=True)
    assert bool(compiled(x, torch.zeros(64, dtype=torch.long)).loss.isfinite())


def check_files(elbo, x, folder):
    """What needs the extra "compress"."""
    with torch.no_grad():
        elbo.net.hidden.weight[::2] = 0
    small = vd.shrink(elbo.net, x).net
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in Cnn().parameters())
    vd.save(small, folder / "small.safetensors")
    loaded = vd.load(folder / "small.safetensors", into=Cnn())
    assert bool((loaded.eval()(x) - small(x)).abs().max() < 1e-5)
    vd.pack(small, folder / "small.vdp")
    assert vd.unpack(folder / "small.vdp", into=Cnn()).eval()(x).shape == (64, 3)
    vd.save_noisy(elbo.net, folder / "noisy.safetensors")
    vd.load_noisy(folder / "noisy.safetensors", into=Cnn())
    vd.export_onnx(small, folder / "small.onnx", x[:2])
    assert (folder / "small.onnx").stat().st_size > 0


if __name__ == "__main__":
    trained, data = train()
    check_core(trained, data)
    if "--core" not in sys.argv:
        with tempfile.TemporaryDirectory() as name:
            check_files(trained, data, Path(name))
    print(f"smoke: vardrop {vd.__version__}, torch {torch.__version__}, all well")
