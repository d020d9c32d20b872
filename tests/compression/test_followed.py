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


def check_shrunk(make, dead, x, path, attribute, left):
    """Units go, the outputs stay, and the file is read again."""
    net = make().eval()
    dead(net)
    small = vd.shrink(net, x).net
    assert attribute(small) == left
    vd.save(small, path)
    again = vd.load(path, into=make()).eval()
    with torch.no_grad():
        for other in (small, again):
            torch.testing.assert_close(other(x), net(x))


def test_bare_parameters_lose_units(tmp_path):
    def shifted():
        run = lambda net, x: net.b(net.a(x) * net.factor + net.shift[0])
        tensors = {"shift": nn.Parameter(torch.randn(1, 6)), "factor": nn.Parameter(torch.randn(6))}
        return Parts(run, a=nn.Linear(3, 6), b=nn.Linear(6, 2), **tensors)

    def dead(net):
        net.b.weight.data[:, 1:3] = 0

    check_shrunk(shifted, dead, torch.randn(2, 3), tmp_path / "a", lambda n: n.factor.shape[0], 4)
    check_shrunk(shifted, dead, torch.randn(2, 3), tmp_path / "b", lambda n: n.shift.shape[1], 4)


def test_bare_parameters_without_an_axis_of_units_keep_them():
    def run(net, x):
        return net.b(net.a(x) @ net.mix)

    net = Parts(run, a=nn.Linear(3, 6), b=nn.Linear(5, 2), mix=nn.Parameter(torch.randn(6, 5)))
    net.a.weight.data[:2], net.a.bias.data[:2] = 0, 0
    small = vd.shrink(net.eval(), torch.randn(2, 3)).net
    assert (small.a.out_features, small.b.in_features) == (6, 5)


class NormAct(nn.BatchNorm2d):
    """A norm with its activation, as in timm."""

    def __init__(self, width):
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class Frozen(nn.Module):
    def __init__(self, width):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(width) + 0.5)

    def forward(self, x):
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        weight, bias, mean, variance = (t.view(1, -1, 1, 1) for t in tensors)
        return (x - mean) * variance.rsqrt() * weight + bias


@pytest.mark.parametrize("norm, left", [
    (NormAct, 5), (Frozen, 5), (nn.SyncBatchNorm, 5), (lambda n: nn.GroupNorm(4, n), 6),
])  # fmt: skip
def test_norms_of_other_libraries_go_along(norm, left, tmp_path):
    def make():
        return nn.Sequential(nn.Conv2d(2, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 3, 3))

    def dead(net):
        net[3].weight.data[:, 2:5] = 0  # of groups of two channels one is dead

    x = torch.randn(2, 2, 8, 8)
    torch.manual_seed(0)
    state = make().state_dict()

    def restored():
        net = make()
        net.load_state_dict(state)
        return net

    check_shrunk(restored, dead, x, tmp_path / "net", lambda net: net[0].out_channels, left)


class Head(nn.Module):
    """Attention with norms of queries and keys, whose number of heads is an attribute."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.num_heads, self.size = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = RMSNorm(self.size), RMSNorm(self.size)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.size)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.out(y.transpose(1, 2).flatten(2))


def test_heads_with_norms_of_queries_and_keys_go(tmp_path):
    def dead(net):
        net.out.weight.data[:, 4:8] = 0

    torch.manual_seed(0)
    state = Head().state_dict()

    def make():
        net = Head()
        net.load_state_dict(state)
        return net

    x = torch.randn(2, 5, 12)
    check_shrunk(
        make, dead, x, tmp_path / "net", lambda net: (net.num_heads, net.qkv.out_features), (2, 24)
    )


def test_a_product_with_zero_is_a_constant():
    """Dead gates of a gated layer: the other factor depends on the data, but not the product."""
    run = lambda net, x: net.down(nn.functional.silu(net.gate(x)) * net.up(x))
    net = Parts(run, gate=nn.Linear(3, 6), up=nn.Linear(3, 6), down=nn.Linear(6, 2)).eval()
    net.gate.weight.data[:2], net.gate.bias.data[:2] = 0, 0
    small, x = vd.shrink(net, torch.randn(2, 3)).net, torch.randn(4, 3)
    assert small.up.out_features == 4
    torch.testing.assert_close(small(x), net(x))


def test_nothing_to_remove_has_a_reason():
    plan = vd.shrink(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    ).plan
    assert plan.notes == ("No unit is removed: none of those that could be followed is dead.",)


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
