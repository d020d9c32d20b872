"""Networks on sequences, point clouds and graphs, in plain torch."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from tests.nets import Parts


class PackedLSTM(nn.Module):
    """A tagger over sequences of several lengths."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 12)
        self.lstm = nn.LSTM(12, 10, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(20, 5)

    def forward(self, x, lengths):
        words, options = self.words(x), {"batch_first": True, "enforce_sorted": False}
        packed = pack_padded_sequence(words, lengths.cpu(), **options)
        _, (state, _) = self.lstm(packed)
        return self.head(torch.cat([state[-2], state[-1]], 1))


class GraphConv(nn.Module):
    """The mean over neighbours, for nodes and a list of edges (2, E)."""

    def __init__(self, inputs, outputs, linear):
        super().__init__()
        self.lin, self.bias = linear(inputs, outputs), nn.Parameter(torch.zeros(outputs))

    def forward(self, x, edges):
        x, (source, target) = self.lin(x), edges
        total = torch.zeros_like(x).index_add_(0, target, x[source])
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(source)))
        return total / degree.clamp(min=1)[:, None] + self.bias


class GraphLinear(nn.Module):
    """PyTorch Geometric's dense layer: its own class with a weight of (outputs, inputs)."""

    def __init__(self, in_channels, out_channels, bias=False):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels) / in_channels**0.5)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.in_channels**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


class GraphNet(nn.Module):
    def __init__(self, linear=lambda i, o: nn.Linear(i, o, bias=False)):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(6, 16, linear), GraphConv(16, 12, linear)
        self.head = nn.Linear(12, 5)

    def forward(self, x, edge_index):
        x = functional.dropout(self.conv1(x, edge_index).relu(), 0.5, training=self.training)
        return self.head(self.conv2(x, edge_index).relu())


def tcn():
    """A temporal convolutional network: causal, dilated, with residual blocks."""
    chomp = lambda size: Parts(lambda net, x: x[..., :-size])

    class Block(nn.Module):
        def __init__(self, inputs, outputs, dilation):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv1d(inputs, outputs, 3, padding=2 * dilation, dilation=dilation),
                chomp(2 * dilation), nn.ReLU(), nn.Dropout(0.2),
                nn.Conv1d(outputs, outputs, 3, padding=2 * dilation, dilation=dilation),
                chomp(2 * dilation), nn.ReLU(), nn.Dropout1d(0.2),
            )  # fmt: skip
            self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

        def forward(self, x):
            return (self.net(x) + self.skip(x)).relu()

    def run(net, x):
        return net.head(net.blocks(x)[..., -1])

    blocks = nn.Sequential(Block(3, 12, 1), Block(12, 12, 2), Block(12, 8, 4))
    return Parts(run, blocks=blocks, head=nn.Linear(8, 5))


def pointnet():
    """Shared dense layers on points, and the maximum over them."""

    def run(net, x):
        return net.head(net.points(x.transpose(1, 2)).amax(2))

    points = nn.Sequential(
        nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 24, 1),
        nn.BatchNorm1d(24), nn.ReLU(),
    )  # fmt: skip
    head = nn.Sequential(
        nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Linear(16, 5),
    )  # fmt: skip
    return Parts(run, points=points, head=head)


def gru_classifier():
    def run(net, x):
        return net.head(net.gru(x)[0][:, -1])

    return Parts(run, gru=nn.GRU(6, 16, batch_first=True), head=nn.Linear(16, 5))


class TimeBlock(nn.Module):
    """A residual block of a denoiser, with the time added to the channels."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.time = nn.Linear(16, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, time):
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(time)[..., None, None]
        y = self.conv2(self.dropout(functional.silu(self.norm2(y))))
        return self.skip(x) + y


class DiffusionUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16))
        self.inp, self.down, self.middle = (
            nn.Conv2d(3, 8, 3, 1, 1), TimeBlock(8, 16), TimeBlock(16, 16)
        )  # fmt: skip
        self.up, self.norm = TimeBlock(32, 8), nn.GroupNorm(4, 8)
        self.out = nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x, time):
        t = self.embed(time[:, None].float())
        down = self.down(self.inp(x), t)
        y = self.middle(functional.avg_pool2d(down, 2), t)
        y = torch.cat([functional.interpolate(y, scale_factor=2.0), down], 1)
        return self.out(functional.silu(self.norm(self.up(y, t))))
