import copy
from functools import partial

import pytest
import torch
from numpy import s_
from torch import nn
from torch.nn import functional

import vardrop as vd
from tests.compression.nets import NETS, Residual, RMSNorm, Separable, check_cut, sparsen
from tests.nets import Parts, assert_unchanged
from tests.refusals import assert_refused
from tests.zoo.vision import BatchNormAct2d, FrozenBatchNorm2d
from vardrop.compression import Select, ShrinkPlan, shrink


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_equal(net, small, shape, tolerance=1e-5):
    x = torch.randn(16, *shape, generator=generator(1)).to(next(net.parameters()))
    assert torch.allclose(net(x), small(x), rtol=0, atol=tolerance)


@pytest.mark.parametrize("drop_inputs", [False, True])
@pytest.mark.parametrize("make, shape", NETS.values(), ids=NETS)
def test_shrunken_equals_masked(make, shape, drop_inputs):
    net = sparsen(make(), generator(), share=0.7)
    small, plan = shrink(net, torch.zeros(1, *shape), drop_inputs=drop_inputs)
    assert_equal(net, small, shape)
    before, after = plan.total("bytes")
    assert after < 0.9 * before


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_keep_their_memory_format(layout):
    """Also kernels of 1 x 1 and of one channel, which are contiguous in both formats."""
    net = Separable().to(memory_format=layout)
    small = shrink(sparsen(net, generator(), share=0.7), torch.zeros(1, 3, 12, 12)).net
    expected = copy.deepcopy(small).to(memory_format=layout)
    kernels = [(m.weight, net.get_submodule(name).weight, expected.get_submodule(name).weight)
               for name, m in small.named_modules() if isinstance(m, nn.Conv2d)]  # fmt: skip
    assert any(kernel.shape != before.shape for kernel, before, _ in kernels)
    assert all(kernel.stride() == like.stride() for kernel, _, like in kernels)


@pytest.mark.parametrize("make, shape", NETS.values(), ids=NETS)
def test_noisy_net_shrinks_to_its_masked_means(make, shape):
    net = vd.convert(sparsen(make(), generator()), vd.sparse_vd()).eval()
    for module in net.modules():
        if isinstance(module, vd.layers.Variational):
            module.log_sigma2.data.copy_(torch.randn(module.log_sigma2.shape) * 4 - 6)
    kept = {n: r.kept for n, r in vd.noisy.relevance(net).items()}
    expected = copy.deepcopy(net)
    for n, k in kept.items():
        with torch.no_grad():
            expected.get_submodule(n).weight.mul_(k)
    with assert_unchanged(net):
        small, plan = shrink(net, torch.zeros(1, *shape))
    assert_equal(expected, small, shape)
    assert not any(isinstance(m, vd.noisy.Noisy) for m in small.modules())
    assert set(plan.standard_deviations) == {f"{n}.weight" for n in kept}
    for n, deviation in plan.standard_deviations.items():
        assert deviation.shape == small.get_parameter(n).shape


# Units that go or stay: what is zero, the sizes that are left, and what the plan says.


def chain(*layers):
    return nn.Sequential(*layers)


def beside_a_constant(*layers):
    """Behind two channels, of which the second is constant and not zero."""
    return lambda: chain(nn.Conv2d(1, 2, 3), *layers)


def shuffled():
    run = lambda net, x: net.b(functional.channel_shuffle(net.a(x).relu(), 2))
    return Parts(run, a=nn.Conv2d(2, 6, 1), b=nn.Conv2d(6, 4, 3))


def shifted():
    tensors = {"shift": nn.Parameter(torch.randn(1, 6)), "factor": nn.Parameter(torch.randn(6))}
    run = lambda net, x: net.b(net.a(x) * net.factor + net.shift[0])
    return Parts(run, a=nn.Linear(3, 6), b=nn.Linear(6, 2), **tensors)


def mixed():
    layers = {"a": nn.Linear(3, 6), "b": nn.Linear(5, 2)}
    return Parts(lambda n, x: n.b(n.a(x) @ n.mix), **layers, mix=nn.Parameter(torch.randn(6, 5)))


def gated():
    layers = {"gate": nn.Linear(3, 6), "up": nn.Linear(3, 6), "down": nn.Linear(6, 2)}
    return Parts(lambda n, x: n.down(functional.silu(n.gate(x)) * n.up(x)), **layers)


def attended():
    """One map of attention multiplies every channel; a vector of channels scales them."""

    def run(net, x):
        h = net.stem(x).relu() * net.map(x).sigmoid()
        return net.head(h * net.squeeze(h.mean((2, 3))).sigmoid()[..., None, None])

    layers = {"stem": nn.Conv2d(2, 8, 3), "map": nn.Conv2d(2, 1, 3), "squeeze": nn.Linear(8, 8)}
    return Parts(run, **layers, head=nn.Conv2d(8, 3, 1))


def heads():
    """Attention with norms of queries and keys, whose number of heads is an attribute."""

    def run(net, x):
        q, k, v = net.qkv(x).unflatten(-1, (3, net.num_heads, 4)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(net.q_norm(q), net.k_norm(k), v)
        return net.out(y.transpose(1, 2).flatten(2))

    norms = {"q_norm": RMSNorm(4), "k_norm": RMSNorm(4)}
    net = Parts(run, qkv=nn.Linear(12, 36), out=nn.Linear(12, 12), **norms)
    net.num_heads = 3
    return net


NORMS = {
    "of timm": BatchNormAct2d, "of torchvision": FrozenBatchNorm2d, "synchronised": nn.SyncBatchNorm,
    "of instances": nn.InstanceNorm2d, "not affine": partial(nn.BatchNorm2d, affine=False),
    "of tracked instances": partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
    "without statistics": partial(nn.BatchNorm2d, track_running_stats=False),
    "bare": partial(nn.BatchNorm2d, affine=False, track_running_stats=False),
    "of groups": partial(nn.GroupNorm, 4),  # of two channels, one of which may be alive
}  # fmt: skip
CONSTANT = [("0.weight", 1)]
CUTS = {
    "a unit that nothing reads, and what feeds it alone": (
        lambda: chain(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (3,),
        [("2.weight", s_[:2, 0]), ("4.weight", s_[:, 2])], {"0.out_features": 3, "2.out_features": 2}, ""),
    "a constant folds into a new bias": (
        beside_a_constant(nn.Tanh(), nn.Conv2d(2, 3, 3, bias=False)), (1, 7, 7), CONSTANT, {"0.out_channels": 1, "2.in_channels": 1}, ""),
    **{f"a constant folds with {mode} padding": (
        beside_a_constant(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)), (1, 7, 7), CONSTANT, {"0.out_channels": 1}, "")
       for mode in ("circular", "reflect", "replicate")},
    "a constant that meets zeros around the image": (
        beside_a_constant(nn.Conv2d(2, 3, 3, padding=1)), (1, 7, 7), CONSTANT, {"0.out_channels": 2},
        "1 units of '0' stay: its constant meets the padding border of '1'."),
    "a constant that is averaged with such zeros": (
        beside_a_constant(nn.AvgPool2d(3, padding=1), nn.Conv2d(2, 3, 1)), (1, 8, 8), CONSTANT, {"0.out_channels": 2},
        "its constant meets the padding border of '2'"),
    "a layer norm": (
        lambda: chain(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (3,), [("2.weight", s_[:, 1:])], {"0.out_features": 4},
        "3 units of '0' stay: '1' (LayerNorm) takes its units together."),
    "a softmax": (
        lambda: chain(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)), (3,), [("2.weight", s_[:, 1:])], {"0.out_features": 4},
        "it mixes with other units before '2'"),
    "depthwise channels": (
        Separable, (3, 8, 8), [("deep.weight", s_[:3])], {"stem.out_channels": 5, "deep.groups": 5, "point.in_channels": 5}, ""),
    "groups keep equal sizes": (  # two inputs of the first group, one of the second
        lambda: chain(nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2)), (2, 6, 6),
        [("2.weight", s_[:3, :2]), ("2.weight", s_[3:, 3])], {"0.out_channels": 6, "2.in_channels": 6, "2.groups": 2},
        "1 units stay to keep layers of equal width."),
    "transposed layers": (
        lambda: chain(nn.ConvTranspose2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2)), (2, 5, 5),
        [("2.weight", [0, 5])], {"0.out_channels": 4, "2.in_channels": 4}, ""),
    "one unit of a dead layer": (
        lambda: chain(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,), [("0.weight", s_[:])], {"0.out_features": 1, "2.in_features": 1}, ""),
    "factors that broadcast": (
        attended, (2, 6, 6), [("head.weight", s_[:, 2:5]), ("squeeze.weight", s_[:, 2:5])],
        {"stem.out_channels": 5, "squeeze.out_features": 5, "head.in_channels": 5}, ""),
    # Two groups of three become two groups of two only if one of each goes.
    "channels that are shuffled between groups": (shuffled, (2, 5, 5), [("b.weight", s_[:, [1, 4]])], {}, ""),
    "bare parameters": (shifted, (3,), [("b.weight", s_[:, 1:3])], {"factor.shape": (4,), "shift.shape": (1, 4)}, ""),
    "bare parameters that mix units": (
        mixed, (3,), [("a.weight", s_[:2]), ("a.bias", s_[:2])], {"a.out_features": 6, "b.in_features": 5}, ""),
    "a product with a factor of zero": (gated, (3,), [("gate.weight", s_[:2]), ("gate.bias", s_[:2])], {"up.out_features": 4}, ""),
    "heads with norms of queries and keys": (heads, (5, 12), [("out.weight", s_[:, 4:8])], {"num_heads": 2, "qkv.out_features": 24}, ""),
    **{f"a norm, {name}": (
        lambda norm=norm: chain(nn.Conv2d(2, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 3, 3)), (2, 8, 8), [("3.weight", s_[:, 2:5])],
        {"0.out_channels": 6 if name == "of groups" else 5}, "") for name, norm in NORMS.items()},
}  # fmt: skip


@pytest.mark.parametrize("make, shape, zeros, sizes, note", CUTS.values(), ids=CUTS)
def test_dead_units_go_and_the_plan_says_why_others_stay(tmp_path, make, shape, zeros, sizes, note):
    net, x = make().double().eval(), torch.randn(2, *shape, dtype=torch.double)
    with torch.no_grad():
        for parameter, index in zeros:
            net.get_parameter(parameter)[index] = 0
    larger = shape if len(shape) < 3 else (shape[0], *(n + 1 for n in shape[1:]))
    others = torch.randn(8, *larger, dtype=torch.double)
    plan = check_cut(net, x, make().double(), tmp_path / "net", sizes, others).plan
    assert note in str(plan)


def test_embedding_dimension_shrinks(tmp_path):
    make = lambda: chain(nn.Embedding(10, 6), nn.Linear(6, 3))
    net, words = make(), torch.randint(0, 10, (5, 4))
    net[1].weight.data[:, 2:4] = 0
    net[0].weight.data[:, 5] = 0.7  # the same for every word: a constant
    check_cut(net, 0 * words, make(), tmp_path / "net", {"0.embedding_dim": 3}, words)


@pytest.mark.parametrize("make, read, index", [
    (lambda: nn.Linear(5, 2), "weight", [1, 3]),
    (lambda: chain(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), "2.weight", [0]),
])  # fmt: skip
def test_layers_select_the_inputs_that_they_read(tmp_path, make, read, index):
    net, x = make(), torch.randn(2, 5 if read == "weight" else 3)
    weight = net.get_parameter(read).data
    weight[:, [i for i in range(weight.shape[1]) if i not in index]] = 0
    small = check_cut(net, x, make(), tmp_path / "net", {}, drop_inputs=True).net
    (select,) = (m for m in small.modules() if isinstance(m, Select))
    assert select.index.tolist() == index


class Stem(nn.Module):
    """A first convolution in groups, perhaps with a skip connection, and a second convolution."""

    def __init__(self, groups, skip):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, groups=groups, bias=False)
        self.norm, self.relu, self.pool = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.second, self.head = nn.Conv2d(4, 6, 1), nn.Linear(6 * 16, 3)
        self.skip = skip

    def forward(self, x):
        y = self.first(x)
        y = self.pool(self.relu(self.norm(y + x if self.skip else y)))
        return self.head(self.second(y).relu().flatten(1))


@pytest.mark.parametrize(("groups", "skip", "left", "macs"), [
    (1, False, 2, (9888, 4993)), (2, False, 2, (5280, 2689)), (4, False, 4, (2976, 2689)),
    (1, True, 4, (9888, 9601)), (2, True, 4, (5280, 4993)), (4, True, 4, (2976, 2689)),
])  # fmt: skip
def test_units_that_are_also_inputs_of_the_model_stay(tmp_path, groups, skip, left, macs):
    """They are selected after the layer, which then reads all channels of the image."""
    net, x = sparsen(Stem(groups, skip), generator(), share=0.0, units=0.0), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        net.second.weight[:, [1, 2]] = 0  # one channel of each of two groups
        net.head.weight[:, 2 * 16 : 3 * 16] = 0
        net.head.weight[:, :5] = 0  # some pixels of a channel
    sizes = {"first.in_channels": 4, "first.out_channels": left, "head.1.in_features": 5 * 16 - 5}
    plan = check_cut(net, x, Stem(groups, skip), tmp_path / "net", sizes, drop_inputs=True).plan
    second = next(r for r in plan.layers if r.name == "second").after
    assert (second.inputs, second.outputs) == (2, 5)
    assert plan.total("macs") == macs


def test_hidden_units_that_are_returned_stay():
    run = lambda net, x: (net.b(h := net.a(x).relu()), h)
    net = Parts(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    net.b.weight.data.zero_()
    assert shrink(net, torch.zeros(1, 3)).net.a.out_features == 4


def test_net_that_marks_cannot_be_followed_through_stays_whole():
    class Strict(Residual):
        def forward(self, x):
            if bool(x.isnan().any()):
                raise ValueError("a missing value")
            return super().forward(x)

    net = sparsen(Strict(), generator())
    small, plan = shrink(net, torch.zeros(1, 3, 8, 8))
    assert_equal(net, small, (3, 8, 8))
    assert all(r.before.outputs == r.after.outputs for r in plan.layers)
    assert "marks cannot be followed through this model (a missing value)" in str(plan)


def test_layer_that_runs_twice_and_tied_weights_stay():
    run = lambda net, x: net.b(net.a(net.a(x).relu()).relu())
    net = Parts(run, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    net.a.weight.data[:, 0] = 0
    net.b.weight.data[:, 0] = 0
    report = shrink(net, torch.zeros(1, 4)).plan
    assert report.layers[0].after.outputs == 4
    assert "'a' runs 2 times" in str(report)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    tied[2].weight = tied[0].weight
    tied[4].weight.data[:, 0] = 0
    assert "'2' shares its weights" in str(shrink(tied, torch.zeros(1, 4)).plan)


def test_report_counts_what_is_there():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    net[3].weight.data[:, 4:] = 0
    report = shrink(net, torch.zeros(1, 1, 4, 4)).plan
    assert isinstance(report, ShrinkPlan)
    conv, dense = report.layers
    assert (conv.before.weights, conv.after.weights) == (18, 9)
    assert (conv.before.macs, conv.after.macs) == (18 * 4, 9 * 4)
    assert (dense.before.bytes, dense.after.bytes) == (4 * 27, 4 * 15)
    assert report.total("weights") == (42, 21)
    assert report.compression == 2
    assert "42 -> 21" in str(report)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(mode):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[2].weight.data[:, 1:] = 0
    with mode():
        small = shrink(net, torch.zeros(1, 3)).net
    assert small[0].out_features == 1
    assert_equal(net, small, (3,))


def test_modes_and_random_state_stay():
    net, state = Residual().train(), torch.get_rng_state()
    with assert_unchanged(net):
        shrink(net, torch.zeros(1, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("spread", [2.0, 6.0])
def test_gates_fold_into_a_smaller_net(spread):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    vd.convert(net, vd.Recipe(gate=vd.gates.BetaBernoulli()), include="2").eval()
    for parameter in net[2].gate.parameters():
        parameter.data.add_(torch.linspace(-spread, spread, 6))
    score = vd.noisy.relevance(net)["2.gate"].score
    cut = float(score.sort().values[2:4].mean())
    small = shrink(net, torch.zeros(1, 4), threshold=cut).net
    assert small[0].out_features == 3
    expected = copy.deepcopy(net)
    expected[2].weight.data[:, score <= cut] = 0
    assert_equal(expected, small, (4,))


def test_gates_of_tied_layers_are_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    vd.convert(net, vd.l0(), include=nn.Linear)
    assert_refused("tied weights, into which the mean of one gate", shrink, net, torch.zeros(1, 4))


def test_gate_on_its_own_becomes_a_scale_and_shrinks():
    gate = vd.Gate(vd.gates.NormalJeffreys(), units=6)
    gate.mu.data.copy_(torch.tensor([1.0, 0.5, 1e-4, 2.0, 1e-4, 1.0]))
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), gate, nn.Linear(6, 3)).eval()
    small = shrink(net, torch.zeros(1, 4)).net
    assert small[0].out_features == 4
    assert small[2].factor.tolist() == pytest.approx([1.0, 0.5, 2.0, 1.0])
    expected = copy.deepcopy(net)
    expected[2].mu.data[[2, 4]] = 0
    assert_equal(expected, small, (4,))


@pytest.mark.parametrize(("kind", "groups"), [("dense", 1), ("conv", 1), ("conv", 2)])
def test_deviations_of_bayesian_compression_are_those_of_the_product(kind, groups):
    """Var(z w) = mu^2 s^2 + S^2 m^2 + S^2 s^2, against draws of both."""
    layer = nn.Linear(4, 3) if kind == "dense" else nn.Conv2d(4, 6, 2, groups=groups)
    net = vd.convert(nn.Sequential(layer), vd.bayesian_compression(-1.0, threshold=9.0)).eval()
    with torch.no_grad():
        net[0].gate.mu.copy_(torch.linspace(-1.5, 1.5, len(net[0].gate.mu)))
        net[0].gate.log_sigma2.copy_(torch.linspace(-2.0, 0.5, len(net[0].gate.mu)))
        net[0].log_sigma2.copy_(torch.linspace(-3, -1, layer.weight.numel()).view_as(layer.weight))
    found = shrink(net, torch.zeros(1, 4) if kind == "dense" else torch.zeros(1, 4, 3, 3)).plan
    draws = 40_000
    mu, spread = net[0].gate.mu.detach(), net[0].gate.log_sigma2.detach().mul(0.5).exp()
    mean, sigma = net[0].weight.detach(), net[0].log_sigma2.detach().mul(0.5).exp()
    z = mu + spread * torch.randn(draws, len(mu), generator=generator(3))
    w = mean + sigma * torch.randn(draws, *mean.shape, generator=generator(4))
    # a dense layer gates its inputs, a convolution its output channels
    z = z[:, None, :] if kind == "dense" else z[:, :, None, None, None]
    squares = (z * w - (z * w).mean(0)).square()
    error = squares.std(0) / draws**0.5
    off = (squares.mean(0) - found.standard_deviations["0.weight"].square()).abs() / error
    assert float(off.max()) < 7  # 48 weights at most, family-wise 1e-6
