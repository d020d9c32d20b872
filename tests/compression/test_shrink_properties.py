"""Random small architectures with random zeros: the shrunken net is the masked net."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import nn

import vardrop as vd
from tests.compression.nets import sparsen
from tests.nets import Parts
from vardrop.compression import shrink

SIZE = 18  # pixels
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.PReLU, nn.Identity)


def residual(inner):
    return Parts(lambda net, x: x + net.inner(x), inner=inner)


def concat(inner):
    return Parts(lambda net, x: torch.cat([x, net.inner(x)], 1), inner=inner)


@st.composite
def conv(draw, inputs, outputs=None, same_size=False):
    outputs = outputs or draw(st.sampled_from([2, 4, 6]))
    groups = draw(st.sampled_from([1, 1, 2])) if inputs % 2 == outputs % 2 == 0 else 1
    kernel = draw(st.sampled_from([1, 3]))
    padding = kernel // 2 if same_size else draw(st.integers(0, kernel // 2))
    return nn.Conv2d(
        inputs, outputs, kernel, padding=padding, bias=draw(st.booleans()), groups=groups,
        padding_mode=draw(st.sampled_from(["zeros", "circular", "replicate"])),
    )  # fmt: skip


@st.composite
def block(draw, channels):
    """One block of layers and its number of output channels."""
    kind = draw(st.sampled_from(["conv", "norm", "depthwise", "residual", "concat", "up", "pool"]))
    if kind == "norm":
        return [draw(conv(channels, channels, True)), nn.BatchNorm2d(channels)], channels
    if kind == "depthwise":
        pad = draw(st.integers(0, 1))
        return [nn.Conv2d(channels, channels, 3, padding=pad, groups=channels)], channels
    if kind == "residual":
        first, last = draw(conv(channels, 4, True)), draw(conv(4, channels, True))
        return [residual(nn.Sequential(first, nn.ReLU(), last))], channels
    if kind == "concat":
        return [concat(draw(conv(channels, 2, True)))], channels + 2
    if kind == "up":
        outputs = draw(st.sampled_from([2, 4]))
        return [nn.ConvTranspose2d(channels, outputs, 2)], outputs
    layer = draw(conv(channels))
    if kind == "pool":
        pad, pool = draw(st.integers(0, 1)), draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))
        return [layer, pool(3, stride=1, padding=pad)], layer.out_channels
    return [layer], layer.out_channels


@st.composite
def nets(draw):
    start = draw(st.integers(1, 3))
    stem = draw(conv(start))
    channels, layers = stem.out_channels, [stem, draw(st.sampled_from(ACTIVATIONS))()]
    for _ in range(draw(st.integers(0, 3))):
        more, channels = draw(block(channels))
        layers += [*more, draw(st.sampled_from(ACTIVATIONS))()]
    pooled = draw(st.booleans())
    layers += [nn.AdaptiveAvgPool2d(1 if pooled else 2), nn.Flatten()]
    layers.append(nn.Linear(channels * (1 if pooled else 4), 5, bias=draw(st.booleans())))
    layers.append(draw(st.sampled_from([nn.ReLU(), nn.LayerNorm(5), nn.Tanh()])))
    layers.append(nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share = draw(st.sampled_from([0.0, 0.3, 0.8]))
    net = nn.Sequential(*layers).double()
    for parameter in net.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
    return sparsen(net, generator, share, draw(st.sampled_from([0.2, 0.5]))), start, generator


def example(channels, generator, count=3):
    shape = (count, channels, SIZE, SIZE)
    return torch.randn(shape, generator=generator, dtype=torch.double)


quick = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None,
    phases=[Phase.generate], report_multiple_bugs=False,
)  # fmt: skip


@settings(quick, max_examples=100)
@given(nets(), st.booleans())
def test_shrunken_equals_masked_and_has_nothing_left_to_take(case, drop_inputs):
    net, channels, generator = case
    one = example(channels, generator, 1)
    small, x = shrink(net, one, drop_inputs=drop_inputs).net, example(channels, generator)
    with torch.no_grad():
        expected, found = net(x), small(x)
    scale = max(1.0, float(expected.abs().max()))
    assert torch.allclose(expected, found, rtol=0, atol=1e-7 * scale)
    if not drop_inputs:
        assert all(r.before.outputs == r.after.outputs for r in shrink(small, one).plan.layers)


# How much `shrink` removes: dead channels go whatever pooling, norm or activation follows them.


POOLS = {
    "none": nn.Identity, "max": lambda: nn.MaxPool2d(2),
    "max, overlapping": lambda: nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    "max, dilated": lambda: nn.MaxPool2d(2, dilation=2, stride=1),
    "average": lambda: nn.AvgPool2d(2), "adaptive max": lambda: nn.AdaptiveMaxPool2d(3),
    "adaptive average": lambda: nn.AdaptiveAvgPool2d(3), "power average": lambda: nn.LPPool2d(2, 2),
    "max, and its places": lambda: nn.Sequential(
        nn.MaxPool2d(2, return_indices=True), Parts(lambda net, outputs: outputs[0])),
    "bilinear": lambda: nn.Upsample(scale_factor=0.5, mode="bilinear"),
    "padding": lambda: nn.ZeroPad2d(1),
    "max over positions": lambda: Parts(lambda net, x: x.max(-1, keepdim=True).values),
}  # fmt: skip
NORMS = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, not affine": lambda: nn.BatchNorm2d(8, affine=False),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "instance, tracked": lambda: nn.InstanceNorm2d(8, track_running_stats=True),
}
REMOVED_ACTIVATIONS = {
    "relu": nn.ReLU, "relu in place": lambda: nn.ReLU(inplace=True), "gelu": nn.GELU,
    "tanh": nn.Tanh, "hardswish": nn.Hardswish, "silu": nn.SiLU,
    "elu in place": lambda: nn.ELU(inplace=True), "leaky": nn.LeakyReLU, "prelu": nn.PReLU,
    "prelu by channel": lambda: nn.PReLU(8), "softshrink": nn.Softshrink, "mish": nn.Mish,
    "relu6 in place": lambda: nn.ReLU6(inplace=True), "hardtanh": nn.Hardtanh,
}  # fmt: skip
RECIPES = {
    "sparse_vd": vd.sparse_vd(), "l0": vd.l0(), "structured_pruning": vd.structured_pruning(),
    "beta_bernoulli": vd.beta_bernoulli(), "bayesian_compression": vd.bayesian_compression(),
}  # fmt: skip
_CLOSED = {"logit": -8.0, "log_sigma": 3.0, "raw_a": -9.0, "log_sigma2": 8.0}


class Net(nn.Module):
    """Two convolutions; the first one's channels pass a norm, an activation and a pooling."""

    def __init__(self, norm, activation, pool):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), norm()
        self.activation, self.pool = activation(), pool()
        self.second, self.last = nn.Conv2d(8, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x):
        x = self.pool(self.activation(self.norm(self.first(x))))
        return self.last(self.second(x).mean((2, 3)))


@torch.no_grad()
def with_dead_channels(net, recipe):
    """Five of the eight channels of the first convolution produce zero."""
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d) and m.affine):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    vd.convert(net.eval(), recipe)
    gate = net.first.gate
    if gate is None:
        net.first.weight[3:] = 0
        net.first.log_sigma2[3:] = 4
        return net
    for name, parameter in gate.named_parameters():
        if parameter.dim() == 1 and name in _CLOSED:
            parameter[3:] = _CLOSED[name]
    return net


def check(net):
    small = vd.shrink(net, torch.randn(4, 1, 12, 12)).net
    assert (small.first.out_channels, small.second.in_channels) == (3, 3)


def pairs(ones, others, one, other):
    """All pairs. Pairs that have neither `one` nor `other` are slow tests."""
    return [
        pytest.param(*pair, marks=[] if one in pair or other in pair else pytest.mark.slow)
        for pair in itertools.product(ones, others)
    ]


@pytest.mark.parametrize(("pool", "recipe"), pairs(POOLS, RECIPES, "max", "sparse_vd"))
def test_dead_channels_go_in_front_of_every_pooling(pool, recipe):
    check(with_dead_channels(Net(nn.Identity, nn.ReLU, POOLS[pool]), RECIPES[recipe]))


@pytest.mark.parametrize(("norm", "activation"), pairs(NORMS, REMOVED_ACTIVATIONS, "batch", "relu"))
def test_dead_channels_go_through_every_norm_and_activation(norm, activation):
    net = Net(NORMS[norm], REMOVED_ACTIVATIONS[activation], POOLS["max"])
    check(with_dead_channels(net, vd.sparse_vd()))


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Softplus, nn.Hardsigmoid, nn.LogSigmoid])
def test_constants_of_dead_channels_go_into_the_bias_of_a_layer_without_padding(activation):
    net = Net(NORMS["batch"], activation, POOLS["max"])
    net.second = nn.Conv2d(8, 6, 3)
    check(with_dead_channels(net, vd.sparse_vd()))


def test_channels_that_a_norm_takes_together_stay_and_the_plan_says_why():
    net = Net(lambda: nn.LocalResponseNorm(3), nn.ReLU, POOLS["max"])
    small, plan = vd.shrink(with_dead_channels(net, vd.sparse_vd()), torch.randn(4, 1, 12, 12))
    assert small.first.out_channels == 8
    assert any("units of 'first' stay: " in note for note in plan.notes)


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("pool", ["MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool"])
def test_dead_channels_go_in_one_and_three_dimensions(dims, pool):
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    layers = conv(1, 8, 3), norm(8), nn.ReLU(inplace=True), getattr(nn, f"{pool}{dims}d")(2)
    net = nn.Sequential(*layers, conv(8, 6, 1), nn.Flatten()).eval()
    vd.convert(net, vd.sparse_vd(), include="0")
    net[0].log_sigma2.data[3:] = 8
    small = vd.shrink(net, torch.randn(2, 1, *(8,) * dims)).net
    assert (small[0].out_channels, small[1].num_features, small[4].in_channels) == (3, 3, 3)
