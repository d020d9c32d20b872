"""Nets that tests of prediction share, and draws as a predictor makes them."""

import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from tests.nets import Parts
from vardrop.functional import GeneratorNoise, draw_from


def wrapped(inner):
    """A net inside another module, so that its structure has to be found by running it."""
    return Parts(lambda net, x: net.inner(x), inner=inner)


def run_cnn(net, x):
    x = net.pool(net.relu(net.norm1(net.conv1(x))))
    x = net.relu(net.norm2(net.conv2(x)))
    return net.last(functional.relu(net.hidden(x.view(x.size(0), -1))))


def cnn():
    """BatchNorm, in-place ReLU that is used twice, max pool, a function in forward."""
    convolutions = {"conv1": nn.Conv2d(1, 4, 3), "conv2": nn.Conv2d(4, 5, 2)}
    norms = {"norm1": nn.BatchNorm2d(4), "norm2": nn.BatchNorm2d(5)}
    rest = {"pool": nn.MaxPool2d(2), "relu": nn.ReLU(inplace=True)}
    rest |= {"hidden": nn.Linear(5, 6), "last": nn.Linear(6, 3)}
    return Parts(run_cnn, **convolutions, **norms, **rest)


def run_residual(net, x):
    return net.out(net.drop(x + net.body(x)).mean((2, 3)))


def residual():
    body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
    return Parts(run_residual, body=body, drop=nn.Dropout(0.2), out=nn.Linear(2, 3))


def run_skip(net, x):
    x = torch.tanh(net.stem(x))
    return net.last(x + torch.relu_(net.body(x)))


def skip():
    layers = {"stem": nn.Linear(4, 6), "body": nn.Linear(6, 6), "last": nn.Linear(6, 2)}
    return Parts(run_skip, **layers)


def run_tapped(net, x):
    first = net.body[0](x)
    second = net.more[0](net.body[1:](first))
    return net.out(torch.cat([first + second, net.more[1](second)], 1).mean((2, 3)))


def tapped():
    """Its forward keeps what stands between the parts of a row."""
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    more = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    return Parts(run_tapped, body=body, more=more, out=nn.Linear(8, 3))


def run_tokens(net, x):
    batch, length, _ = x.shape
    query, key, value = net.qkv(x).view(batch, length, 3, 1, 4).permute(2, 0, 3, 1, 4)
    return net.out(functional.scaled_dot_product_attention(query, key, value)).mean((1, 2))


def tokens():
    """Attention over tokens that asks for sizes, and a mean over the positions."""
    return Parts(run_tokens, qkv=nn.Linear(4, 12), out=nn.Linear(4, 2))


def run_last_state(net, x):
    return net.last(net.recurrent(x)[0][:, -1])


def recurrent():
    return Parts(run_last_state, recurrent=nn.LSTM(4, 5, batch_first=True), last=nn.Linear(5, 3))


def run_twice(net, x):
    return net.last(torch.tanh(net.inner(torch.tanh(net.inner(x)))))


def tied():
    return Parts(run_twice, inner=nn.Linear(4, 4), last=nn.Linear(4, 2))


def dense():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def norms():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2), nn.Sequential(nn.Conv2d(4, 4, 2, bias=False), nn.BatchNorm2d(4)),
        nn.Tanh(), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def grouped():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 2, groups=2), nn.Flatten())


def rows():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))


NETS = {  # and the shapes of their examples
    "conv": (cnn, (1, 6, 6)), "residual": (residual, (2, 5, 5)), "skip": (skip, (4,)),
    "tapped": (tapped, (2, 5, 5)), "tokens": (tokens, (5, 4)), "recurrent": (recurrent, (6, 4)),
    "tied": (tied, (4,)), "dense": (dense, (5,)), "norms": (norms, (2, 6, 6)),
    "encoder": (encoder, (3, 8)), "grouped": (grouped, (2, 6, 6)), "rows": (rows, (2, 6, 6)),
}  # fmt: skip


SPARSE = vd.sparse_vd(log_sigma2=-3.0)


def trained(name, recipe=SPARSE, examples=7):
    """A converted net in eval mode, with statistics that are not initial, and its inputs."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, generator = make(), torch.Generator().manual_seed(2)
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
            tensor.normal_(generator=generator)
        norm.running_var.uniform_(0.5, 2, generator=generator)
    return vd.convert(net, recipe).eval(), torch.randn(examples, *shape)


def strategy_of(net, x, **options):
    return vd.Predictor(net, **options).strategy_for(x)


@torch.no_grad()
def blocks(net, x, samples, block, seed=0):
    """Draws as the estimator draws, so many at a time."""
    strategy = strategy_of(net, x)
    strategy.most = block
    with draw_from(GeneratorNoise(seed)):
        return torch.cat(list(strategy.draws(x, samples)))
