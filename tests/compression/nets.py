"""Small nets of the kinds that pruning has to understand, zeros for them, and what a cut keeps."""

import operator

import torch
from torch import nn

from experiments.trainings import lenet5, mlp
from vardrop.compression import load, save, shrink


class Residual(nn.Module):
    """Conv-BatchNorm stem, one residual block with a projection, a dense head."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.norm1 = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.two, self.norm2 = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        y = self.norm1(self.one(x)).relu()
        x = (x + self.norm2(self.two(y))).relu()
        return self.head(x.mean((2, 3)))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Separable(nn.Module):
    """Depthwise and pointwise convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.deep, self.norm = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
        self.point = nn.Conv2d(8, 12, 1)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = self.norm(self.deep(self.stem(x).relu())).relu()
        return self.head(self.point(x).relu().amax((2, 3)))


class DenseBlock(nn.Module):
    """Every layer reads all that came before, concatenated."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.c, self.head = nn.Conv2d(8, 6, 3, padding=1), nn.Linear(14, 3)

    def forward(self, x):
        x = self.a(x).relu()
        x = torch.cat([x, self.b(x).relu()], 1)
        x = torch.cat([x, self.c(x).relu()], 1)
        return self.head(x.mean((2, 3)))


class Classifier(nn.Module):
    """Tokens, positions and a mask of padding, as small as can be."""

    def __init__(self, norm_first=False, pool="mean"):
        super().__init__()
        self.tokens = nn.Embedding(20, 12, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(8, 12) / 10)
        layer = nn.TransformerEncoderLayer(12, 4, 20, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head, self.pool = nn.Linear(12, 2), pool

    def forward(self, x):
        padding = x == 0
        y = self.tokens(x) + self.positions[: x.shape[1]]
        y = self.encoder(y, src_key_padding_mask=padding)
        if self.pool == "first":
            return self.head(y[:, 0])
        kept = (~padding).unsqueeze(-1).float()
        return self.head((y * kept).sum(1) / kept.sum(1))


NETS = {
    "lenet-300-100": (lambda: mlp(784, 300, 100, 10), (1, 28, 28)),
    "lenet-5": (lenet5, (1, 28, 28)), "residual": (Residual, (3, 8, 8)),
    "separable": (Separable, (3, 8, 8)), "dense block": (DenseBlock, (3, 8, 8)),
}  # fmt: skip


def accuracy(output, target):
    return float((output.argmax(1) == target).double().mean())


@torch.no_grad()
def sparsen(net, generator, share=0.5, units=0.3):
    """Zero a share of all weights, and all weights of some outputs and of some inputs."""

    def chosen(*shape, rate):
        return torch.rand(*shape, generator=generator) < rate

    for module in net.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() > 1:
            weight[chosen(*weight.shape, rate=share)] = 0
            weight[chosen(len(weight), rate=units)] = 0
            weight[:, chosen(weight.shape[1], rate=units)] = 0
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight, module.bias):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            module.running_var.copy_(torch.rand(len(weight), generator=generator) + 0.5)
    return net.eval()


@torch.no_grad()
def check_cut(net, x, into, path, sizes, others=None, **options):
    """Shrink a net to sizes, by module and attribute; outputs stay, and its file is read again."""
    shrunk = shrink(net, x, **options)
    small = shrunk.net
    assert {place: operator.attrgetter(place)(small) for place in sizes} == sizes
    others = torch.randn(8, *x.shape[1:]) if others is None else others
    tolerance = {"rtol": 0, "atol": 1e-12 if others.dtype == torch.double else 1e-5}
    torch.testing.assert_close(small(others), net(others), **tolerance)
    save(small, path)
    assert torch.equal(load(path, into=into)(others), small(others))
    return shrunk
