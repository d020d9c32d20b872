"""Nets whose insides marks have to find their way through: heads, caches, encoders, broadcasts."""

import importlib

import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import accuracy
from tests.nets import Parts
from vardrop.compression import Select


def test_passes_grow_as_the_digits_of_the_number_of_layers(monkeypatch):
    # Passes that measure the latency, as many as fit into their time, do not count.
    shrinking = importlib.import_module("vardrop.compression.shrink")
    monkeypatch.setattr(shrinking, "time_interleaved", lambda nets, **_: dict.fromkeys(nets, 1.0))
    counts = []
    for layers in (2, 4, 8):
        net, passes = nn.Sequential(*(encoder()[1] for _ in range(layers))), []
        net.register_forward_pre_hook(lambda net, args, passes=passes: passes.append(1))
        vd.shrink(net, torch.randn(1, 4, 8))
        counts.append(len(passes))
    assert counts[2] - counts[1] <= 8  # two per digit and numbering, so work is linear in layers
    assert counts[1] - counts[0] <= 8
    chain, calls = [m for _ in range(64) for m in (nn.Linear(8, 8), nn.ReLU())], []
    chain[0].register_forward_pre_hook(lambda layer, args: calls.append(1))
    vd.shrink(nn.Sequential(*chain), torch.randn(1, 8))
    assert len(calls) < 64  # all layers at once


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(6, 8), layer).eval()


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


def test_a_threshold_of_an_encoder_and_of_two_inputs():
    net = vd.convert(encoder(), vd.sparse_vd()).eval()
    data = (torch.randn(8, 5, 6), torch.zeros(8, dtype=torch.long))
    assert vd.choose_threshold(net, data, lambda o, y: -o.square().mean(), max_drop=1e6, points=3)

    two = {"a": nn.Linear(4, 6), "b": nn.Linear(3, 6), "c": nn.Linear(6, 2)}
    run = lambda net, x, context: net.c(torch.relu(net.a(x) + net.b(context)))
    net = vd.convert(Parts(run, **two), vd.sparse_vd())
    data = [((torch.randn(8, 4), torch.randn(8, 3)), torch.randint(2, (8,)))]
    found = vd.choose_threshold(net, data, accuracy, sparsity=0.5, points=9)
    chosen = next(p for p in found.points if p.threshold == float(found))
    assert chosen.sparsity >= 0.5


def test_nothing_to_remove_has_a_reason():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = vd.shrink(net, torch.randn(2, 3)).plan
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
