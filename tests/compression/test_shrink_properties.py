"""Random small architectures with random zeros: the shrunken net is the masked net."""

import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import nn

from tests.compression.nets import sparsen
from vardrop.compression import shrink

SIZE = 18  # pixels
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.PReLU, nn.Identity)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Concat(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.cat([x, self.inner(x)], 1)


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
        inner = nn.Sequential(
            draw(conv(channels, 4, True)), nn.ReLU(), draw(conv(4, channels, True))
        )
        return [Residual(inner)], channels
    if kind == "concat":
        return [Concat(draw(conv(channels, 2, True)))], channels + 2
    if kind == "up":
        outputs = draw(st.sampled_from([2, 4]))
        return [nn.ConvTranspose2d(channels, outputs, 2)], outputs
    layer = draw(conv(channels))
    if kind == "pool":
        pad = draw(st.integers(0, 1))
        pool = draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))
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
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
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
