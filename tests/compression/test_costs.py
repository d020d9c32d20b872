"""MACs: products in the code of any module are counted."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vardrop as vd


class Cell(nn.Module):
    """A recurrent cell, which is no layer that shrink cuts, and a product of bare parameters."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 6), nn.Linear(6, 3)
        self.mix = nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        h = torch.zeros(len(x), 6)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h) @ self.mix


class Attending(nn.Module):
    """Attention that stays whole, as it has keys of its own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0])


def normalised():
    first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(8, 3))


def transposed():
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 6, 3, groups=2))


NETS = {
    "cell": (Cell, (4, 5)), "attention": (Attending, (4, 8)), "weight norm": (normalised, (5,)),
    "grouped and transposed": (transposed, (2, 7, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_macs_are_those_of_torch(name, monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    make, shape = NETS[name]
    net, x = make().eval(), torch.randn(2, *shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(x)
    assert vd.shrink(net, x).plan.total("macs")[0] == counter.get_total_flops() // 2 // len(x)


def test_modules_of_no_known_kind_have_a_row():
    net, x = Cell().eval(), torch.randn(2, 4, 5)
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
