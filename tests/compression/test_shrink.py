import copy
import importlib

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import NETS, Residual, Separable, sparsen
from tests.refusals import assert_refused
from vardrop.compression import Select, ShrinkPlan, shrink


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_equal(net, small, shape, tolerance=1e-5):
    x = torch.randn(16, *shape, generator=generator(1)).to(next(net.parameters()))
    assert torch.allclose(net(x), small(x), rtol=0, atol=tolerance)


@pytest.mark.parametrize("drop_inputs", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_shrunken_equals_masked(name, drop_inputs):
    make, shape = NETS[name]
    net = sparsen(make(), generator(), share=0.7)
    plan = shrink(net, torch.zeros(1, *shape), drop_inputs=drop_inputs).plan
    assert_equal(net, plan.apply(net), shape)
    before, after = plan.total("bytes")
    assert after < 0.9 * before


@pytest.mark.parametrize("name", NETS)
def test_noisy_net_shrinks_to_its_masked_means(name):
    make, shape = NETS[name]
    net = vd.convert(sparsen(make(), generator()), vd.sparse_vd()).eval()
    for module in net.modules():
        if isinstance(module, vd.layers.Variational):
            module.log_sigma2.data.copy_(torch.randn(module.log_sigma2.shape) * 4 - 6)
    kept = {n: r.kept for n, r in vd.noisy.relevance(net).items()}
    expected = copy.deepcopy(net)
    for n, k in kept.items():
        with torch.no_grad():
            expected.get_submodule(n).weight.mul_(k)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    small, plan = shrink(net, torch.zeros(1, *shape))
    assert_equal(expected, small, shape)
    assert not any(isinstance(m, vd.noisy.Noisy) for m in small.modules())
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())
    assert set(plan.standard_deviations) == {f"{n}.weight" for n in kept}
    for n, deviation in plan.standard_deviations.items():
        assert deviation.shape == small.get_parameter(n).shape


def test_unit_without_readers_goes_with_what_feeds_it_alone():
    net = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    ).double()
    net[2].weight.data[:2, 0] = 0  # unit 0 of the first layer feeds unit 2 of the second only
    net[4].weight.data[:, 2] = 0
    small = shrink(net, torch.zeros(1, 3, dtype=torch.double)).net
    assert (small[0].out_features, small[2].out_features) == (3, 2)
    assert_equal(net, small, (3,), 1e-12)


def test_constant_of_a_unit_without_inputs_is_folded():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 3, 3, bias=False)).double()
    net[0].weight.data[1] = 0
    net[0].bias.data[1] = 2.0
    small = shrink(net, torch.zeros(1, 1, 7, 7, dtype=torch.double)).net
    assert small[0].out_channels == 1
    assert small[2].bias is not None
    expected = torch.tanh(torch.tensor(2.0)).double() * net[2].weight[:, 1].sum((1, 2))
    assert torch.allclose(small[2].bias, expected)
    assert_equal(net, small, (1, 7, 7), 1e-12)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_padding_border_decides_whether_a_constant_folds(mode):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode))
    net[0].weight.data[1] = 0
    net[0].bias.data[1] = 2.0
    small, plan = shrink(net, torch.zeros(1, 1, 7, 7))
    assert small[0].out_channels == (2 if mode == "zeros" else 1)
    text = "1 units of '0' stay: its constant meets the padding border of '1'."
    assert (text in plan.notes) == (mode == "zeros")
    assert_equal(net, small, (1, 7, 7))


def test_average_over_padding_stops_a_constant():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d(3, padding=1), nn.Conv2d(2, 3, 1))
    net[0].weight.data[1] = 0
    net[0].bias.data[1] = 2.0
    small, plan = shrink(net, torch.zeros(1, 1, 8, 8))
    assert small[0].out_channels == 2
    assert "its constant meets the padding border of '2'" in str(plan)
    assert_equal(net, small, (1, 8, 8))


def test_layer_norm_keeps_its_units_and_says_so():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    net[2].weight.data[:, 1:] = 0
    report = shrink(net, torch.zeros(1, 3)).plan
    assert "3 units of '0' stay: '1' (LayerNorm) takes its units together." in report.notes
    small = shrink(net, torch.zeros(1, 3), drop_inputs=True).net
    assert isinstance(small[2][0], Select)
    assert small[2][1].in_features == 1
    assert_equal(net, small, (3,))


def test_softmax_between_layers_mixes_units():
    net = nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2))
    net[2].weight.data[:, 1:] = 0
    small, plan = shrink(net, torch.zeros(1, 3))
    assert small[0].out_features == 4
    assert "it mixes with other units before '2'" in str(plan)
    assert_equal(net, small, (3,))


def test_hidden_units_that_are_returned_stay():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x).relu()
            return self.b(h), h

    net = Two()
    net.b.weight.data.zero_()
    assert shrink(net, torch.zeros(1, 3)).net.a.out_features == 4


def test_net_that_marks_cannot_be_followed_through_stays_whole():
    class Strict(Residual):
        def forward(self, x):
            if bool(x.isnan().any()):
                raise ValueError("a missing value")
            return super().forward(x)

    net = sparsen(Strict(), generator())
    plan = shrink(net, torch.zeros(1, 3, 8, 8)).plan
    assert_equal(net, plan.apply(net), (3, 8, 8))
    assert all(r.before.outputs == r.after.outputs for r in plan.layers)
    assert "marks cannot be followed through this model (a missing value)" in str(plan)


def test_layer_that_runs_twice_and_tied_weights_stay():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(self.a(x).relu()).relu())

    net = Twice()
    net.a.weight.data[:, 0] = 0
    net.b.weight.data[:, 0] = 0
    report = shrink(net, torch.zeros(1, 4)).plan
    assert report.layers[0].after.outputs == 4
    assert "'a' runs 2 times" in str(report)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    tied[2].weight = tied[0].weight
    tied[4].weight.data[:, 0] = 0
    assert "'2' shares its weights" in str(shrink(tied, torch.zeros(1, 4)).plan)


def test_depthwise_channel_goes_with_its_neighbours():
    net = Separable().eval()
    net.deep.weight.data[:3] = 0
    small = shrink(net, torch.zeros(1, 3, 8, 8)).net
    assert (small.stem.out_channels, small.deep.groups, small.point.in_channels) == (5, 5, 5)
    assert_equal(net, small, (3, 8, 8))


def test_groups_keep_equal_sizes():
    net = nn.Sequential(nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2))
    net[2].weight.data[:3, :2] = 0  # two inputs of the first group
    net[2].weight.data[3:, 3] = 0  # one input of the second
    small, plan = shrink(net, torch.zeros(1, 2, 6, 6))
    assert (small[0].out_channels, small[2].in_channels, small[2].groups) == (6, 6, 2)
    assert "1 units stay to keep layers of equal width." in plan.notes
    assert_equal(net, small, (2, 6, 6))


def test_transposed_layers_lose_channels():
    net = nn.Sequential(
        nn.ConvTranspose2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2)
    )
    net[2].weight.data[0] = 0
    net[2].weight.data[5] = 0
    small = shrink(net, torch.zeros(1, 2, 5, 5)).net
    assert (small[0].out_channels, small[2].in_channels) == (4, 4)
    assert_equal(net, small, (2, 5, 5))


def test_embedding_dimension_shrinks():
    net = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3))
    net[1].weight.data[:, 2:4] = 0
    net[0].weight.data[:, 5] = 0.7  # the same for every word: a constant
    small = shrink(net, torch.zeros(2, 4, dtype=torch.long)).net
    assert small[0].embedding_dim == 3
    words = torch.randint(0, 10, (5, 4))
    assert torch.allclose(net(words), small(words), atol=1e-6)


def test_dead_net_keeps_one_unit_a_layer():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight.data.zero_()
    small = shrink(net, torch.zeros(1, 3)).net
    assert (small[0].out_features, small[2].in_features) == (1, 1)
    assert_equal(net, small, (3,))


def test_bare_layer_selects_its_inputs():
    net = nn.Linear(5, 2)
    net.weight.data[:, ::2] = 0
    small = shrink(net, torch.zeros(1, 5), drop_inputs=True).net
    assert small[0].index.tolist() == [1, 3]
    assert_equal(net, small, (5,))


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
    net = Residual().train()
    state = torch.get_rng_state()
    shrink(net, torch.zeros(1, 3, 8, 8))
    assert net.training
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


@pytest.mark.parametrize(
    "recipe", [vd.bayesian_compression(-6.0, threshold=9.0), vd.beta_bernoulli(), vd.l0()]
)
def test_gates_of_tied_layers_fold_into_weights_of_their_own(recipe):
    net = nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    ).eval()
    net[2].weight = net[0].weight
    vd.convert(net, recipe, include=nn.Linear)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if ".gate." in name:  # other numbers in every layer
                end = 0.1 * (1 + int(name[0]))
                parameter.add_(torch.linspace(-2.0, end, parameter.numel()).view_as(parameter))
    never = {n: -1e9 if r.keep_above else 1e9 for n, r in vd.relevance(net).items()}
    plan = shrink(net, torch.zeros(1, 4), never).plan
    assert_equal(net, plan.apply(net), (4,))
    assert "'2' gets separate weights: its gate is folded in." in plan.notes


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


def test_missing_package_is_named(monkeypatch, tmp_path):
    from vardrop._core import errors

    missing, import_module = "safetensors", importlib.import_module

    def absent(name):
        if name.startswith(missing):
            raise ImportError(f"No module named '{name}'")
        return import_module(name)

    monkeypatch.setattr(errors.importlib, "import_module", absent)
    for missing in ("safetensors", "numpy"):
        match = rf"{missing} to be installed.*vardrop\[compress\]"
        assert_refused(match, vd.compression.save, nn.Linear(2, 2), tmp_path / "net.safetensors")
