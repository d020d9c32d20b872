"""Moment propagation against quadrature, closed forms and many samples."""

import math

import pytest
import torch
from scipy.integrate import quad
from torch import nn
from torch.nn import functional

import vardrop as vd
from experiments.trainings import mlp
from tests.nets import Parts
from tests.prediction.nets import wrapped
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance
from vardrop._core.calls import output_tensor
from vardrop.prediction.moments import RULES, MomentDraws, Moments, RandomTensor

ACTIVATIONS = {
    "relu": functional.relu, "leaky_relu": functional.leaky_relu, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "gelu": functional.gelu, "silu": functional.silu,
    "softplus": functional.softplus,
}  # fmt: skip


def propagate(net, x):
    return MomentDraws(net, output_tensor, 2**28).propagate(x)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (1.5, 0.7), (-2.0, 0.5), (0.3, 0.01)])
def test_activations_against_quadrature(name, mean, std):
    function = ACTIVATIONS[name]

    def moment(power):
        def integrand(z):
            value = float(function(torch.tensor(mean + std * z, dtype=torch.float64)))
            return value**power * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

        kink = -mean / std
        points = [kink] if -12 < kink < 12 else None
        return quad(integrand, -12, 12, points=points, limit=200, epsabs=1e-12)[0]

    expected = moment(1), moment(2) - moment(1) ** 2
    pair = Moments(*(torch.tensor([v], dtype=torch.float64) for v in (mean, std**2)))
    found = RULES[name](pair)
    # Rectifiers are closed forms; the others take 20 nodes, and tanh has poles near the axis.
    tolerance = 1e-9 if "relu" in name else 1e-4
    for a, b in zip(found, expected, strict=True):
        assert float(a) == pytest.approx(b, abs=tolerance)


def random(mean, variance):
    return RandomTensor(Moments(mean.view(1, 1, 2, 2), variance.view(1, 1, 2, 2)))


def test_the_largest_of_four_normals_against_samples():
    mean, variance = torch.tensor([0.3, -0.2, 0.1, 0.5]), torch.tensor([1.0, 0.5, 2.0, 0.1])
    found = functional.max_pool2d(random(mean, variance), 2).moments
    noise = torch.randn(1_000_000, 4, generator=torch.Generator().manual_seed(0))
    largest = (mean + variance.sqrt() * noise).amax(1)
    # Eight nodes, for deviations that differ by a factor of four; within 2 % and 10 %.
    assert float(found[0]) == pytest.approx(float(largest.mean()), rel=0.02)
    assert float(found[1].sqrt()) == pytest.approx(float(largest.std()), rel=0.1)
    both = functional.max_pool2d(functional.relu(random(mean - 1, variance)), 2).moments
    assert float(both[0]) == pytest.approx(float((largest - 1).relu().mean()), rel=0.02)
    assert float(both[1].sqrt()) == pytest.approx(float((largest - 1).relu().std()), rel=0.1)


def test_linear_parts_are_exact():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-2.0), include="0")
    x = torch.randn(5, 3).double()
    found = propagate(net, x)
    torch.testing.assert_close(found.mean, net(x))
    scale = net[1].weight / (net[1].running_var + net[1].eps).sqrt()
    hidden = x.square() @ net[0].variance().T * scale.square()
    torch.testing.assert_close(found.variance, hidden @ net[2].weight.square().T)


def residual(net, x):
    return 0.5 * x + torch.relu(net.inner(x)).view(-1, 3) + 1.0


@pytest.mark.parametrize(
    "build",
    [
        lambda: vd.convert(
            nn.Sequential(Parts(residual, inner=nn.Linear(3, 3))), vd.bayes_by_backprop(None, -3.0)
        ),
        lambda: nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 2)),
        lambda: vd.convert(
            nn.Sequential(nn.Conv1d(1, 4, 2), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(4, 2)),
            vd.Recipe(vd.AdditiveGaussian(-3.0), noisy_bias=True),
        ),
    ],
    ids=["residual", "dropout", "conv, noisy bias"],
)
def test_whole_nets_against_samples(build):
    torch.manual_seed(1)
    net = build()
    x = torch.randn(3, 1, 3) if isinstance(net[0], nn.Conv1d) else torch.randn(3, 3)
    options = {"likelihood": vd.Values(), "keep": 0}
    sampled = vd.predict(net, x, 20_000, seed=0, **options)
    found = vd.predict(net, x, mode="moments", **options)
    scale = sampled.mean.abs().max()
    assert (found.mean - sampled.mean).abs().max() < 0.02 * scale + 6 * sampled.standard_error.max()
    open_units = sampled.std > 0.1 * sampled.std.max()
    assert (found.std / sampled.std - 1)[open_units].abs().max() < 0.1


def _small_conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.mark.parametrize("log_sigma2", [-6.0, -4.0])
@pytest.mark.parametrize("kind", ["dense", pytest.param("conv", marks=pytest.mark.slow)])
def test_moments_of_every_layer_against_100_000_samples(kind, log_sigma2):
    net = mlp(16, 64, 32, 4) if kind == "dense" else _small_conv_net()
    x = torch.randn(2, 16) if kind == "dense" else torch.randn(1, 1, 14, 14)
    vd.convert(net, vd.sparse_vd(log_sigma2=log_sigma2))
    for depth in range(1, len(net) + 1):
        if not any(isinstance(m, vd.layers.Variational) for m in net[:depth]):
            continue
        part = nn.Sequential(net[:depth], nn.Flatten())
        p = vd.predict(part, x, 100_000, likelihood=vd.Values(), seed=1, keep=0)
        found = propagate(part, x)
        # Mean: 2 % of the layer's size. Deviation: 10 % of every unit that is not almost shut,
        # for the sampled deviation of a unit that opens once in a thousand draws is no reference.
        assert (found.mean - p.mean).norm() < 0.02 * p.mean.norm(), depth
        open_units = p.std > 0.2 * p.std.max()
        assert (found.variance.sqrt() / p.std - 1)[open_units].abs().max() < 0.1, depth


def test_uncertainty_of_the_moments_is_that_of_samples():
    net, x = vd.convert(mlp(16, 64, 32, 4), vd.sparse_vd(log_sigma2=-3.0)), torch.randn(8, 16)
    sampled, found = vd.predict(net, x, 20_000, seed=0), vd.predict(net, x, 20_000, mode="moments")
    assert (found.probs - sampled.probs).abs().max() < 0.02
    assert (found.epistemic / sampled.epistemic - 1).abs().max() < 0.1
    assert torch.equal(found.probs, vd.predict(net, x, 20_000, mode="moments").probs)


def test_unsupported_modules_are_named_and_the_net_is_left_alone():
    net = vd.convert(nn.Sequential(nn.Linear(3, 4), nn.Softmax(1)), vd.sparse_vd()).train()
    assert_refused(r"'1' \(Softmax\), which calls softmax", propagate, net, torch.zeros(1, 3))
    assert net.training
    assert all("forward" not in m.__dict__ and not m._forward_hooks for m in net.modules())
    image, drop = torch.zeros(1, 1, 4, 4), nn.Sequential(nn.Conv2d(1, 2, 1), nn.Dropout2d(0.5))
    assert_refused(r"'1' \(Dropout2d\), which calls noise without", propagate, drop, image)
    pool = nn.Sequential(vd.Conv2d(1, 2, 1, posterior=vd.AdditiveGaussian()), nn.MaxPool2d(2, 1))
    assert_refused(r"'1' \(MaxPool2d\), which calls max_pool2d with over", propagate, pool, image)
    bilinear = vd.Bilinear(2, 2, 1, posterior=vd.AdditiveGaussian())
    assert_refused("without known moments", propagate, wrapped(bilinear), torch.zeros(1, 2))
    conv = vd.convert(nn.Sequential(nn.Conv2d(1, 2, 1)), vd.bayes_by_backprop())
    assert_refused(r"Flipout\(\) \(module '0'\), .*=vardrop.local_rep", propagate, conv, image)
    pairing = Parts(lambda net, x: (x, x))
    assert_refused("return one tensor.*but got tuple", propagate, pairing, torch.zeros(1, 2))


def test_the_output_is_picked_from_a_single_tensor_too():
    net, x = vd.convert(nn.Linear(4, 3), vd.sparse_vd()), torch.ones(5, 4)
    picked = vd.predict(net, x, mode="moments", output=lambda y: y.view(5, 3, 1))
    assert picked.mean.shape == (5, 3, 1)
    told = "not subscriptable"
    assert_refused(told, vd.predict, net, x, mode="moments", output=lambda y: y[:, :2])


def test_what_stands_before_the_noise_may_be_any_code():
    def last(net, x):
        x[:, 0] = 0  # in place, and by an index
        return torch.cat([x, x], -1)[..., 1]

    before = nn.LayerNorm(3), nn.Softmax(1), nn.Unflatten(1, (3, 1)), Parts(last)
    net = nn.Sequential(*before, nn.Linear(3, 2)).double()
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-2.0), "4").eval()
    x = torch.randn(2, 3).double()
    found = propagate(net, x)
    torch.testing.assert_close(found.mean, net(x))
    torch.testing.assert_close(found.variance, net[:4](x).square() @ net[4].variance().T)
    assert not propagate(net[:4], x).variance.any()


def forward(after):
    """A noisy layer, and some operation on its output."""
    run = lambda net, x: after(net.layer(x))
    return vd.convert(Parts(run, layer=nn.Linear(6, 6)), vd.bayes_by_backprop(log_sigma2=-2.0))


def overwrite(h):
    h.add_(1)
    other = h
    other *= 2
    functional.relu(h, inplace=True)
    return h


EXACT = {
    "minus one": lambda h: h - 1, "one minus": lambda h: 1 - h, "half": lambda h: h / 2,
    "negative": lambda h: -h,
    "two axes changed": lambda h: h.view(-1, 3, 2).permute(0, 2, 1).reshape(3, 6),
    "a tensor plus": lambda h: torch.arange(6.0) + h,
    "a tensor times": lambda h: torch.arange(6.0) * h, "mean": lambda h: h.mean(1, keepdim=True),
    "mean of two axes": lambda h: h.view(-1, 3, 2).mean((1, 2)).unsqueeze(1),
    "dropout": lambda h: functional.dropout(h, 0.5, training=True),
    "no dropout": lambda h: functional.dropout(h, 0.5, training=False),
    "in place": overwrite,
}  # fmt: skip


def check_against_samples(net, x, draws=20_000):
    """Mean and variance of brute-force draws in double precision.

    z-tests of every output, right for all of them with probability 1 - 1e-6 each.
    """
    net, x = net.double().eval(), x.double()
    found = vd.predict(net, x, mode="moments", likelihood=vd.Values())
    samples = vd.predict(net, x, draws, likelihood=vd.Values(), seed=0).draws
    assert_mean(samples, found.mean)
    assert_variance(samples, found.output_variance)


@pytest.mark.parametrize("name", EXACT)
def test_linear_operations_are_exact(name):
    check_against_samples(forward(EXACT[name]), torch.randn(3, 6), 4000)


def assign_item(h):
    h[0] = 1


def only_tensors(h):
    raise RuntimeError(f"Tensor type unknown to einops {type(h)}")


REFUSED = {
    r"operand type\(s\) for \*\*": lambda h: h**3, "item assignment": assign_item,
    "not subscriptable": lambda h: h[:, 0], "'>' not supported": lambda h: h > 0,
    "eq": lambda h: h == 0, "bool": lambda h: h if h else -h,
    "item": lambda h: h.item(), "softmax": lambda h: h.softmax(1),
    "layer_norm": lambda h: functional.layer_norm(h, (6,)), "cat": lambda h: torch.cat([h, h], 1),
    "expand": lambda h: h.expand(2, 3, 6), "operand type.* for /": lambda h: 1 / h,
    "div with a random argument after": lambda h: torch.ones(6) / h,
    "mul of random tensors that depend": lambda h: h * torch.tanh(h),
    "add of random tensors that depend": lambda h: h + h,
    "randn, a random function": lambda h: h + torch.randn(6),
    "dropout2d": lambda h: functional.dropout2d(h, 0.5, True),
    "batch_norm with the statistics": lambda h: functional.batch_norm(h, None, None, training=True),
    "code that takes only tensors": only_tensors, "T": lambda h: h.T,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_operations_without_a_rule_are_refused_by_name(name):
    told = rf"'\(net\)' \(Parts\), which calls .*{name}"
    assert_refused(told, propagate, forward(REFUSED[name]), torch.ones(3, 6))


SHARED = {
    "channel": (vd.BinaryDropout(granularity="channel"), (1, 2, 3, 3)),
    "LogNormal": (vd.LogNormal(), (1, 2, 3, 3)),
    "example, dense": (vd.BinaryDropout(0.5, "example"), (1, 2)),
    "example, maps": (vd.GaussianDropout(0.3, per="layer", granularity="example"), (1, 2, 3, 3)),
}


@pytest.mark.parametrize("gate, shape", SHARED.values(), ids=SHARED)
def test_gates_with_one_draw_for_several_elements_are_refused(gate, shape):
    net = nn.Sequential(nn.Identity(), nn.Sequential(vd.Gate(gate, 2, axis=1)), nn.Flatten())
    assert_refused(r"\(Gate\).* one draw for several elements", propagate, net, torch.ones(shape))


@pytest.mark.parametrize("gate", [
    vd.BinaryDropout(0.3, "channel"), vd.BinaryDropout(0.3), vd.GaussianDropout(0.3),
    vd.LogNormal(mu=-3.0, log_sigma=1.5), vd.NormalJeffreys(log_sigma2=1.0),  # both below threshold
])  # fmt: skip
def test_gates_with_one_element_for_every_draw_are_exact(gate):
    net = vd.convert(nn.Linear(8, 3, bias=False), vd.Recipe(gate=gate))
    check_against_samples(net, torch.randn(4, 8))


POOLS = {
    "plain": (nn.AvgPool2d(2), (8, 8)), "padding": (nn.AvgPool2d(3, 2, padding=1), (8, 8)),
    "divisor": (nn.AvgPool2d(2, divisor_override=1), (6, 6)),
    "overlap": (nn.AvgPool2d((3, 2), 1), (5, 5)), "adaptive": (nn.AdaptiveAvgPool2d(4), (8, 8)),
    "adaptive, one size kept": (nn.AdaptiveAvgPool2d((None, 2)), (3, 4)),
    "one axis": (nn.AvgPool1d(3, 2, padding=1), (8,)),
    "adaptive, one axis": (nn.AdaptiveAvgPool1d(3), (6,)),
}  # fmt: skip


LOCAL = vd.bayes_by_backprop(log_sigma2=0.0, estimator=vd.local_reparameterization)


@pytest.mark.parametrize("pool, size", POOLS.values(), ids=POOLS)
def test_average_pooling_against_samples(pool, size):
    conv = (nn.Conv1d if len(size) == 1 else nn.Conv2d)(1, 2, 1)
    net = vd.convert(nn.Sequential(conv, pool, nn.Flatten()), LOCAL)
    check_against_samples(net, torch.randn(1, 1, *size))


@pytest.mark.parametrize("pool", [
    nn.AvgPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    nn.AdaptiveAvgPool2d(3),
])  # fmt: skip
def test_average_pooling_with_windows_of_several_sizes_is_refused(pool):
    net = vd.convert(nn.Sequential(nn.Conv2d(1, 2, 1), pool, nn.Flatten()), vd.sparse_vd())
    assert_refused(
        r"Pool2d\), which calls .* several sizes", propagate, net, torch.ones(1, 1, 8, 8)
    )
