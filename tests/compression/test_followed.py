"""Nets whose insides marks have to find their way through: heads, caches, encoders, broadcasts."""

import importlib

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import accuracy
from tests.nets import Parts
from vardrop.compression import Select


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def turned(x, angle):
    """Rotary positions: pairs of units of a head are turned into each other."""
    left, right = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-right, left], -1) * angle.sin()


class Block(nn.Module):
    """Grouped-query attention over a cache, and a gated feed-forward net."""

    def __init__(self, width, hidden, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cache):
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, length, -1, self.size).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        angle = torch.arange(length)[:, None] * torch.ones(self.size) / 7
        k, v = torch.cat([cache[0], turned(k, angle)], 2), torch.cat([cache[1], v], 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        weights = torch.softmax(turned(q, angle) @ k.mT / self.size**0.5, -1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, layers, width=16, hidden=12, heads=4, groups=2, words=20):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, hidden, heads, groups) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)
        self.passes = 0

    def forward(self, words):
        self.passes += 1
        x = self.words(words)
        for block in self.layers:
            empty = torch.zeros(len(words), block.groups, 0, block.size)
            x = block(x, (empty, empty))
        return self.head(self.norm(x))


def test_grouped_heads_and_a_cache_end_in_a_smaller_net():
    net = Llama(2).eval()
    for block in net.layers:
        block.down.weight.data[:, :5] = 0
    small = vd.shrink(net, torch.randint(20, (2, 5))).net
    for block in small.layers:
        assert (block.gate.out_features, block.up.out_features, block.down.in_features) == (7, 7, 7)
        assert block.q.out_features == 16
    words = torch.randint(20, (3, 9))
    assert torch.allclose(small(words), net(words), atol=1e-5)


def test_passes_grow_as_the_digits_of_the_number_of_layers(monkeypatch):
    # Passes that measure the latency, as many as fit into their time, do not count.
    shrinking = importlib.import_module("vardrop.compression.shrink")
    monkeypatch.setattr(shrinking, "time_interleaved", lambda nets, **_: dict.fromkeys(nets, 1.0))
    passes = []
    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda net, x: passes.append(1) or forward(net, x))
    counts = []
    for layers in (2, 4, 8):
        passes.clear()
        vd.shrink(Llama(layers), torch.randint(20, (1, 4)))
        counts.append(len(passes))
    assert counts[2] - counts[1] <= 8  # two per digit and numbering, so work is linear in layers
    assert counts[1] - counts[0] <= 8
    chain = [m for _ in range(64) for m in (nn.Linear(8, 8), nn.ReLU())]
    calls = []
    chain[0].register_forward_pre_hook(lambda layer, args: calls.append(1))
    vd.shrink(nn.Sequential(*chain), torch.randn(1, 8))
    assert len(calls) < 64  # all layers at once


def encoder():
    return nn.Sequential(
        nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    ).eval()


def test_layers_whose_weight_other_code_reads_keep_their_inputs():
    net, x = encoder(), torch.randn(2, 5, 6)
    with torch.no_grad():
        net[0].weight[:, 0] = 0
        net[1].linear1.weight[:, :3] = 0
        net[1].linear2.weight[:, :7] = 0
    small, plan = vd.shrink(net, x, drop_inputs=True)
    assert torch.allclose(small(x), net(x), atol=1e-5)
    assert isinstance(small[0][0], Select)
    assert small[1].linear1.out_features == 9
    assert any("'1.linear1' keeps inputs that it does not read" in n for n in plan.notes)


def test_budgets_of_an_encoder_and_of_two_inputs():
    net = vd.convert(encoder(), vd.sparse_vd()).eval()
    data = (torch.randn(8, 5, 6), torch.zeros(8, dtype=torch.long))
    found = vd.choose_threshold(net, data, lambda o, y: -o.square().mean(), macs=10**6, points=3)
    assert all(p.macs <= 10**6 for p in found.points)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x, context):
            return self.c(torch.relu(self.a(x) + self.b(context)))

    net = vd.convert(Two(), vd.sparse_vd())
    data = [((torch.randn(8, 4), torch.randn(8, 3)), torch.randint(2, (8,)))]
    for budget in ({"macs": 30}, {"bytes": 300}):
        (kind, limit), *_ = budget.items()
        found = vd.choose_threshold(net, data, accuracy, **budget, points=9)
        chosen = next(p for p in found.points if p.threshold == float(found))
        assert getattr(chosen, kind) <= limit


def test_sparse_layers_stay_dense_where_other_code_reads_their_weight():
    net = nn.TransformerEncoderLayer(64, 2, 2048, batch_first=True).eval()
    for layer in (net.linear1, net.linear2):
        layer.weight.data[torch.rand(layer.weight.shape) > 0.002] = 0
    x = torch.randn(4, 8, 64)
    assert torch.allclose(vd.sparsify(net, x)(x), net(x), atol=1e-4)


class Attended(nn.Module):
    """One map of attention multiplies every channel; a vector of channels scales them."""

    def __init__(self):
        super().__init__()
        self.stem, self.map, self.squeeze = nn.Conv2d(2, 8, 3), nn.Conv2d(2, 1, 3), nn.Linear(8, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        h = self.stem(x).relu() * self.map(x).sigmoid()
        return self.head(h * self.squeeze(h.mean((2, 3))).sigmoid()[..., None, None])


def test_broadcasts_let_channels_go():
    net = Attended().eval()
    net.head.weight.data[:, 2:5] = 0
    net.squeeze.weight.data[:, 2:5] = 0
    small = vd.shrink(net, torch.randn(1, 2, 6, 6)).net
    assert (small.stem.out_channels, small.squeeze.out_features, small.head.in_channels) == (
        5,
        5,
        5,
    )
    x = torch.randn(2, 2, 7, 7)
    assert torch.allclose(small(x), net(x), atol=1e-6)


@pytest.mark.parametrize("norm", [
    nn.InstanceNorm2d(8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, affine=False, track_running_stats=False),
    nn.BatchNorm2d(8, track_running_stats=False),
])  # fmt: skip
def test_norms_of_single_units_go_along(tmp_path, norm):
    def make():
        return nn.Sequential(nn.Conv2d(2, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 3, 3)).eval()

    net = make()
    net[3].weight.data[:, 2:5] = 0
    small = vd.shrink(net, torch.randn(2, 2, 8, 8)).net
    assert small[0].out_channels == small[1].num_features == 5
    x = torch.randn(2, 2, 9, 9)
    with torch.no_grad():
        assert torch.allclose(small(x), net(x), atol=1e-5)
        vd.save(small, tmp_path / "net")
        assert torch.equal(vd.load(tmp_path / "net", into=make())(x), small(x))


def test_channels_shuffled_between_groups_find_their_readers():
    def shuffled():
        run = lambda net, x: net.b(nn.functional.channel_shuffle(net.a(x).relu(), 2))
        return Parts(run, a=nn.Conv2d(2, 6, 1), b=nn.Conv2d(6, 4, 3))

    net = shuffled().eval()
    net.b.weight.data[:, [1, 4]] = 0  # units 3 and 2 of the first layer
    small = vd.shrink(net, torch.randn(1, 2, 5, 5)).net
    # two groups of three become two groups of two only if one of each goes
    x = torch.randn(3, 2, 6, 6)
    assert torch.allclose(small(x), net(x), atol=1e-6)


def test_bare_parameters_keep_their_units():
    def shifted():
        run = lambda net, x: net.b(net.a(x) + net.shift)
        return Parts(run, a=nn.Linear(3, 6), b=nn.Linear(6, 2), shift=nn.Parameter(torch.ones(6)))

    net = shifted().eval()
    net.b.weight.data[:, 1:3] = 0
    plan = vd.shrink(net, torch.randn(1, 3)).plan
    assert plan.notes == ("2 units of 'a' stay: a bare parameter takes part.",)


def test_deviations_of_an_embedding_follow_its_columns(tmp_path):
    def make():
        return nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(12, 3))

    net = vd.convert(make(), vd.sparse_vd(log_sigma2=-9.0)).eval()
    net[2].log_sigma2.data[:, [1, 7]] = 20.0
    small, plan = vd.shrink(net, torch.randint(10, (4, 2)))
    assert small[0].embedding_dim == 5
    vd.pack(vd.Shrunk(small, plan), tmp_path / "net.vdp", tolerance=0.01)
    index = torch.randint(10, (5, 2))
    with torch.no_grad():
        back = vd.unpack(tmp_path / "net.vdp", into=make())
        assert torch.allclose(back(index), small(index), atol=1e-3)
