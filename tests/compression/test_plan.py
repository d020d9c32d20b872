"""The plan of a shrunken net: a value that prints and says what was proven."""

import re

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vardrop as vd
from tests.nets import Parts, assert_unchanged
from vardrop.compression import Select, ShrinkPlan


@pytest.mark.parametrize("drop_inputs", [False, True])
def test_plan_is_a_value_that_prints(drop_inputs):
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    vd.convert(net, vd.sparse_vd(log_sigma2=-12.0)).eval()
    net[2].log_sigma2.data[:, :3] = 20.0
    net[0].log_sigma2.data[:, 1] = 20.0
    x = torch.randn(7, 5)
    with assert_unchanged(net):
        small, plan = vd.shrink(net, x[:1], drop_inputs=drop_inputs)
    assert isinstance(plan, ShrinkPlan)
    assert any(isinstance(m, Select) for m in small.modules()) == drop_inputs
    assert {n: tuple(d.shape) for n, d in plan.standard_deviations.items()} == {
        n: tuple(p.shape) for n, p in small.named_parameters() if p.dim() > 1
    }
    assert plan.layers[0].after.outputs == small.get_submodule("2").in_features == 5
    lines = str(plan).splitlines()
    assert lines[0].startswith("MACs 106 -> ")
    assert re.fullmatch(r"latency \S+ -> \S+ ms for the example", lines[1])
    assert min(plan.latency) > 0
    assert plan.proof in lines
    assert lines[-1].startswith("weights that are not zero: ")


@pytest.mark.parametrize("way", [lambda top: top > 8, lambda top: top < 0.05])
def test_unit_that_another_branch_needs_stays(way):
    """A net that takes another way where its input is large, or very small."""
    act = lambda x: torch.sigmoid if way(float(x.abs().max())) else torch.relu
    run = lambda net, x: net.b(act(x)(net.a(x)))
    net = Parts(run, a=nn.Linear(4, 6), b=nn.Linear(6, 2)).eval()
    net.a.weight.data[:3] = 0
    net.a.bias.data[:3] = -1.0  # constants, zero after the relu
    small, plan = vd.shrink(net, torch.randn(2, 4))
    with torch.no_grad():
        for scale in (0.01, 1.0, 10.0, 100.0):
            x = scale * torch.randn(3, 4)
            assert torch.allclose(small(x), net(x), atol=1e-5 * scale)
    assert "3 units of 'a' stay: removing it changes the outputs." in plan.notes
    assert plan.proof == "Equal on the example and on 5 random inputs of scale 0.01 to 100."


def test_rounding_that_large_inputs_magnify_is_no_difference():
    def sharp(net, x):
        """Logits grow with the square of the input, so the softmax magnifies their rounding."""
        h = net.b(net.a(x)) * 30
        return net.c(torch.softmax(h @ h.mT, -1) @ h)

    net = Parts(sharp, a=nn.Linear(6, 40), b=nn.Linear(40, 6), c=nn.Linear(6, 2)).eval()
    net.b.weight.data[:, ::3] = 0
    net.a.weight.data[1] = 0  # a constant, which is folded: sums are rounded in another order
    plan = vd.shrink(net, torch.randn(5, 6)).plan
    assert plan.layers[0].after.outputs == 25
    assert not plan.notes


LOOKUPS = {  # nothing but the integers tells two inputs apart
    "rows of a bare table": lambda net, index: net.rows[index],
    "one hot": lambda net, index: nn.functional.one_hot(index.clamp_max(3), 4).float(),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("example", [[3, 1, 4], [2, 2, 2], [0, 0, 0]])
def test_integers_are_data(lookup, example):
    parts = {"rows": nn.Parameter(torch.randn(10, 4)), "a": nn.Linear(4, 6), "b": nn.Linear(6, 2)}
    net = Parts(lambda net, index: net.b(net.a(LOOKUPS[lookup](net, index)).relu()), **parts).eval()
    net.b.weight.data[:, 0] = 0
    small, index = vd.shrink(net, torch.tensor(example)).net, torch.arange(10)
    assert torch.allclose(small(index), net(index), atol=1e-6)


def test_a_net_that_takes_no_other_integers_is_proven_on_the_example():
    def run(net, x, steps):
        if int(steps) != 3:
            raise ValueError("three steps")
        return net.b(net.a(x).relu())

    net = Parts(run, a=nn.Linear(4, 6), b=nn.Linear(6, 2)).eval()
    plan = vd.shrink(net, (torch.randn(2, 4), torch.tensor(3))).plan
    assert plan.proof.startswith("Equal on the example")
    one = nn.Sequential(nn.Linear(4, 2))
    assert "integers" not in vd.shrink(one, torch.randn(1, 4)).plan.proof


def test_example_stays_as_it_is():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.ReLU(inplace=True))
    x = torch.randn(2, 4)
    before = x.clone()
    vd.shrink(net, x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("write", [vd.save, vd.pack])
def test_head_that_has_no_plain_twin_stays_and_is_named(tmp_path, write):
    def make():
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        return vd.convert(net, vd.dropmax()).eval()

    net, x = make(), torch.randn(3, 4)
    net[0].weight.data[0, 0] = 0
    small, plan = vd.shrink(net, x)
    assert "'2' (Head) stays noisy: it has no plain equivalent." in plan.notes
    write(small, tmp_path / "net")
    again = (vd.load if write is vd.save else vd.unpack)(tmp_path / "net", into=make())
    assert torch.allclose(again(x), small(x), atol=1e-6 if write is vd.save else 0.05)


def test_units_before_one_that_is_put_back_go_too():
    net = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 5), nn.ReLU(),
        nn.Linear(5, 2),
    ).eval()  # fmt: skip
    net[6].weight.data.zero_()  # everything before is dead, and every layer keeps one unit
    x = torch.randn(2, 3)
    small = vd.shrink(net, x).net
    assert [m.out_features for m in small if isinstance(m, nn.Linear)] == [1, 1, 1, 2]
    torch.testing.assert_close(small(x), net(x))


# MACs: products in the code of any module are counted.


def cell():
    """A recurrent cell, which is no layer that shrink cuts, and a product of bare parameters."""

    def run(net, x):
        h = torch.zeros(len(x), 6)
        for t in range(x.shape[1]):
            h = net.cell(x[:, t], h)
        return net.head(h) @ net.mix

    mix = nn.Parameter(torch.randn(3, 2))
    return Parts(run, cell=nn.GRUCell(5, 6), head=nn.Linear(6, 3), mix=mix)


def attending():
    """Attention that stays whole, as it has keys of its own."""
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    run = lambda net, x: net.head(net.attention(x, x, x)[0])
    return Parts(run, attention=attention, head=nn.Linear(8, 3))


def normalised():
    first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(8, 3))


def transposed():
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 6, 3, groups=2))


NETS = {
    "cell": (cell, (4, 5)), "attention": (attending, (4, 8)), "weight norm": (normalised, (5,)),
    "grouped and transposed": (transposed, (2, 7, 7)),
}  # fmt: skip


@pytest.mark.parametrize("make, shape", NETS.values(), ids=NETS)
def test_macs_are_those_of_torch(make, shape, monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    net, x = make().eval(), torch.randn(2, *shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(x)
    assert vd.shrink(net, x).plan.total("macs")[0] == counter.get_total_flops() // 2 // len(x)


def test_modules_of_no_known_kind_have_a_row():
    net, x = cell().eval(), torch.randn(2, 4, 5)
    rows = {r.name: r for r in vd.shrink(net, x).plan.layers}
    assert list(rows) == ["head", "", "cell"]
    assert rows[""].before.macs == 6
    assert rows["cell"].before.macs == 4 * (3 * 6 * 5 + 3 * 6 * 6)
    assert rows["cell"].before.bytes == sum(4 * p.numel() for p in net.cell.parameters())


def test_attention_is_counted_with_its_products():
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    rows = {r.name: r for r in vd.shrink(net, torch.randn(3, 5, 8)).plan.layers}
    assert rows["self_attn.q_proj"].before.macs == 5 * 8 * 8
    assert rows["self_attn.k_proj"].before.macs == 5 * 8 * 8 + 5 * 5 * 8
