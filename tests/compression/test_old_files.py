"""Files that version 0.1 wrote still give the outputs that it gave."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import vardrop as vd

FILES = Path(__file__).parent / "files_of_version_0_1"


def convolutional():
    """The net that was shrunken; its gate stood where the Identity stands."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.PReLU(6), nn.Identity(), nn.Flatten(),
        nn.Linear(24, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3),
    )  # fmt: skip


def dense():
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2))


@pytest.mark.parametrize(
    ("name", "read", "into", "shape"),
    [
        ("net.safetensors", vd.load, convolutional, (2, 2, 4, 4)),
        ("net.vdp", vd.unpack, convolutional, (2, 2, 4, 4)),
        ("sparse.safetensors", vd.load, dense, (2, 40)),
    ],
)
def test_old_file_gives_the_outputs_of_its_time(name, read, into, shape):
    expected = torch.tensor(json.loads((FILES / "expected.json").read_text())[name])
    net = read(FILES / name, into=into())
    x = torch.linspace(-1, 1, expected.new_empty(shape).numel()).view(shape)
    assert torch.allclose(net(x), expected, rtol=0, atol=1e-6)
