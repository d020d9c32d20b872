"""Convolutional networks and vision transformers as torchvision and timm write them, but small."""

import torch
from torch import nn
from torch.nn import functional

from tests.nets import Parts


class DropPath(nn.Module):
    """timm's stochastic depth: the branch of a residual block is left out per example."""

    def __init__(self, drop_prob=0.0, scale_by_keep=True):
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * (mask.div_(keep) if self.scale_by_keep else mask)


class StochasticDepth(nn.Module):
    """torchvision's stochastic depth, which calls a function with the mode."""

    def __init__(self, p, mode="row"):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, input):
        return stochastic_depth(input, self.p, self.mode, self.training)


def stochastic_depth(input, p, mode, training):
    if not training or p == 0.0:
        return input
    size = [input.shape[0] if mode == "row" else 1] + [1] * (input.ndim - 1)
    noise = torch.empty(size, dtype=input.dtype, device=input.device).bernoulli_(1 - p)
    return input * noise.div_(1 - p)


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's norm with its activation: one module for both."""

    def __init__(self, features, act=nn.ReLU, drop=None):
        super().__init__(features)
        self.drop, self.act = drop or nn.Identity(), act()

    def forward(self, x):
        y = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias,
            self.training, self.momentum, self.eps,
        )  # fmt: skip
        return self.act(self.drop(y))


class FrozenBatchNorm2d(nn.Module):
    """torchvision's norm of detection backbones: four buffers."""

    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(features) + 0.5)

    def forward(self, x):
        w, b, mean, var = (t.reshape(1, -1, 1, 1) for t in self.buffers())
        scale = w * (var + self.eps).rsqrt()
        return x * scale + (b - mean * scale)


def conv(inputs, outputs, size=3, stride=1, groups=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)


class Bottleneck(nn.Module):
    """A residual block; with `groups` that of ResNeXt, with `shortcut` a projection."""

    def __init__(self, inputs, width, outputs, norm, groups=1, stride=1):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 1), norm(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, groups), norm(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d, groups=1):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8), norm(8)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(*(Bottleneck(8, 8, 8, norm, groups) for _ in range(2)))
        self.layer2 = Bottleneck(8, 12, 16, norm, groups, stride=2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, x):
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class SqueezeExcite(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, squeezed, 1)
        self.conv_expand = nn.Conv2d(squeezed, channels, 1)
        self.act, self.gate = nn.SiLU(inplace=True), nn.Sigmoid()

    def forward(self, x):
        y = self.conv_expand(self.act(self.conv_reduce(x.mean((2, 3), keepdim=True))))
        return x * self.gate(y)


class InvertedResidual(nn.Module):
    """The block of MobileNet and EfficientNet, with timm's norm-act layers if asked for."""

    def __init__(self, inputs, outputs, wide, act=nn.ReLU6, norm_act=False, se=False, drop=None):
        super().__init__()

        def norm(width):
            if norm_act:
                return BatchNormAct2d(width, act)
            return nn.Sequential(nn.BatchNorm2d(width), act())

        self.expand, self.bn1 = conv(inputs, wide, 1), norm(wide)
        self.deep, self.bn2 = conv(wide, wide, 3, groups=wide), norm(wide)
        self.se = SqueezeExcite(wide, 4) if se else nn.Identity()
        self.project = conv(wide, outputs, 1)
        self.bn3 = BatchNormAct2d(outputs, nn.Identity) if norm_act else nn.BatchNorm2d(outputs)
        self.drop_path = drop or nn.Identity()
        self.residual = inputs == outputs

    def forward(self, x):
        y = self.se(self.bn2(self.deep(self.bn1(self.expand(x)))))
        y = self.bn3(self.project(y))
        return x + self.drop_path(y) if self.residual else y


def mobilenet_v2():
    return nn.Sequential(
        conv(3, 8, stride=2), nn.BatchNorm2d(8), nn.ReLU6(),
        InvertedResidual(8, 8, 24), InvertedResidual(8, 12, 24), InvertedResidual(12, 12, 36),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 5),
    )  # fmt: skip


def mobilenet_v3():
    act = nn.Hardswish
    return nn.Sequential(
        conv(3, 8, stride=2), nn.BatchNorm2d(8), act(),
        InvertedResidual(8, 8, 24, act, se=True), InvertedResidual(8, 12, 24, act, se=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 20), act(),
        nn.Dropout(0.2, inplace=True), nn.Linear(20, 5),
    )  # fmt: skip


def efficientnet_timm():
    act = nn.SiLU
    return nn.Sequential(
        conv(3, 8, stride=2), BatchNormAct2d(8, act),
        InvertedResidual(8, 8, 24, act, True, True, DropPath(0.1)),
        InvertedResidual(8, 12, 24, act, True, True),
        InvertedResidual(12, 12, 36, act, True, True, DropPath(0.2)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def efficientnet_torchvision():
    act = nn.SiLU
    return nn.Sequential(
        conv(3, 8, stride=2), nn.BatchNorm2d(8), act(),
        InvertedResidual(8, 8, 24, act, se=True, drop=StochasticDepth(0.1)),
        InvertedResidual(8, 12, 24, act, se=True),
        InvertedResidual(12, 12, 36, act, se=True, drop=StochasticDepth(0.2)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 5),
    )  # fmt: skip


class DenseLayer(nn.Module):
    """torchvision's layer of a DenseNet: a list of all earlier features, functional dropout."""

    def __init__(self, inputs, growth, rate):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, 12, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(12), conv(12, growth)
        self.drop_rate = float(rate)

    def forward(self, input):
        features = [input] if isinstance(input, torch.Tensor) else input
        y = self.conv1(self.norm1(torch.cat(features, 1)).relu())
        y = self.conv2(self.norm2(y).relu())
        if self.drop_rate > 0:
            y = functional.dropout(y, p=self.drop_rate, training=self.training)
        return y


class DenseNet(nn.Module):
    def __init__(self, growth=6, layers=3, rate=0.1):
        super().__init__()
        self.stem = conv(3, 8, stride=2)
        self.block = nn.ModuleList(DenseLayer(8 + i * growth, growth, rate) for i in range(layers))
        width = 8 + layers * growth
        self.norm, self.classifier = nn.BatchNorm2d(width), nn.Linear(width, 5)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.block:
            features.append(layer(features))
        x = self.norm(torch.cat(features, 1)).relu()
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Two levels with skips; norms per channel, or over groups of channels."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()

        def double(inputs, outputs):
            return nn.Sequential(
                conv(inputs, outputs), norm(outputs), nn.ReLU(inplace=True),
                conv(outputs, outputs), norm(outputs), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.down1, self.down2, self.bottom = double(3, 8), double(8, 12), double(12, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(12, 8, 2, 2)
        self.dec2, self.dec1 = double(24, 12), double(16, 8)
        self.drop, self.out = nn.Dropout2d(0.1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(functional.max_pool2d(a, 2))
        y = self.up2(self.drop(self.bottom(functional.max_pool2d(b, 2))))
        y = self.dec2(torch.cat([b, y], 1))
        return self.out(self.dec1(torch.cat([a, self.up1(y)], 1)))


class VisionTransformer(nn.Module):
    """torchvision's: `nn.MultiheadAttention`, bare class token and positions."""

    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16) / 10)
        layer = nn.TransformerEncoderLayer(
            16, 4, 24, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class TimmAttention(nn.Module):
    """timm's attention: one projection, norms of queries and keys, a dropout rate of a module."""

    def __init__(self, width=16, heads=4, qk_norm=True):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop, self.proj = nn.Dropout(0.1), nn.Linear(width, width)

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj(x.transpose(1, 2).reshape(b, n, self.num_heads * self.head_dim))


def layer_scale(width):
    return Parts(lambda net, x: x * net.gamma, gamma=nn.Parameter(torch.rand(width)))


class TimmBlock(nn.Module):
    def __init__(self, width=16, qk_norm=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.ls1, self.ls2 = (
            TimmAttention(width, qk_norm=qk_norm), layer_scale(width), layer_scale(width)
        )  # fmt: skip
        self.drop_path1, self.drop_path2 = DropPath(0.1), DropPath(0.1)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.fc2(self.act(self.fc1(self.norm2(x))))))


class TimmViT(nn.Module):
    def __init__(self, qk_norm=True):
        super().__init__()
        self.patch, self.pos_embed = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 16, 16))
        self.blocks = nn.Sequential(TimmBlock(qk_norm=qk_norm), TimmBlock(qk_norm=qk_norm))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.norm(self.blocks(x)).mean(1))


class RepVGGBlock(nn.Module):
    """Three parallel branches, as in training: 3x3, 1x1 and a norm of the input."""

    def __init__(self, inputs, outputs, norm=BatchNormAct2d):
        super().__init__()
        self.identity = norm(inputs, nn.Identity) if inputs == outputs else None
        self.conv3, self.bn3 = conv(inputs, outputs), norm(outputs, nn.Identity)
        self.conv1, self.bn1 = conv(inputs, outputs, 1), norm(outputs, nn.Identity)

    def forward(self, x):
        y = self.bn3(self.conv3(x)) + self.bn1(self.conv1(x))
        return (y if self.identity is None else y + self.identity(x)).relu()


def repvgg():
    return nn.Sequential(
        RepVGGBlock(3, 8), RepVGGBlock(8, 8), RepVGGBlock(8, 12), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def mixer():
    """Dense layers over positions and over channels in turn."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
            self.tokens = nn.Sequential(nn.Linear(16, 20), nn.GELU(), nn.Linear(20, 16))
            layers = nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 12)
            self.channels = nn.Sequential(*layers)

        def forward(self, x):
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    def run(net, x):
        x = net.patch(x).flatten(2).transpose(1, 2)
        return net.head(net.norm(net.blocks(x)).mean(1))

    parts = {"patch": nn.Conv2d(3, 12, 4, 4), "blocks": nn.Sequential(Mixing(), Mixing())}
    return Parts(run, **parts, norm=nn.LayerNorm(12), head=nn.Linear(12, 5))
