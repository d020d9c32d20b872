"""Gates in nets: which side they sit on, MC dropout on trained nets, stages, revert, relevance."""

import copy

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused, unchanged
from tests.replay import replay
from vardrop.testing import LAYERS, RECIPES


def conv_net():
    body = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(64, 5))


IMAGE = torch.randn(6, 1, 6, 6)


# ---- where gates sit


STRUCTURED = [vd.beta_bernoulli(), vd.structured_pruning(), vd.l0(), vd.bayesian_compression()]


@pytest.mark.parametrize("recipe", STRUCTURED)
def test_structured_gates_sit_on_dense_inputs_and_output_channels_and_dropout_on_inputs(recipe):
    net = vd.convert(conv_net(), recipe)
    found = {n: (r.kind, r.score.numel()) for n, r in vd.relevance(net).items() if "gate" in n}
    assert found == {"0.gate": ("output", 4), "4.gate": ("input", 64)}
    dropout = vd.convert(conv_net(), vd.recipes.concrete_dropout())
    sides = [(dropout[i].gate.side, dropout[i].gate.units) for i in (0, 4)]
    assert (sides, vd.relevance(dropout)) == ([("input", 1), ("input", 64)], {})


# What is converted after training has to say what it said. The gates of structured pruning are
# below one by their truncation; those of Beta-Bernoulli dropout begin at E pi, as it documents.
NEUTRAL = ("ard", "bayes_by_backprop", "bayesian_compression", "binary_dropout", "gaussian_dropout")
NEUTRAL += ("l0", "mc_dropout", "sparse_vd", "structured_pruning", "variational_dropout")


@pytest.mark.parametrize("name", NEUTRAL)
def test_conversion_leaves_the_outputs_of_a_trained_net(name):
    net = nn.Sequential(conv_net(), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3)).eval()
    expected = net(IMAGE).detach()
    found = vd.convert(net, vd.recipes.METHODS[name]()).eval()(IMAGE).detach()
    share = 0.02 if name == "structured_pruning" else 0.0
    assert float((found - expected).abs().max()) <= share * float(expected.abs().max())


def test_open_gates_of_l0_have_a_mean_of_exactly_one():
    noise = vd.HardConcrete()
    assert noise.unit_mean(noise.initial(3)).tolist() == [1.0, 1.0, 1.0]
    edge = vd.HardConcrete(drop_rate=0.09)  # above 1/12
    assert float(edge.unit_mean(edge.initial(1))) < 1.0


def test_relevance_of_weights_is_log_alpha_below_three():
    net = vd.convert(nn.Sequential(nn.Linear(3, 2)), vd.variational_dropout("B", per="input"))
    net[0].log_alpha.data.copy_(torch.tensor([[-1.0, 2.9, 3.1]]))
    net[0].posterior = vd.MultiplicativeGaussian(per="input")  # without the bound at alpha = 1
    found = vd.relevance(net)["0"]
    assert (found.kind, found.threshold, found.keep_above) == ("weight", 3.0, False)
    assert found.kept.tolist() == [[True, True, False]] * 2
    assert vd.relevance(vd.convert(nn.Sequential(nn.Linear(3, 2)), vd.variance_layer())) == {}


def test_a_closed_channel_is_zero_before_the_non_linearity():
    net = vd.convert(conv_net(), vd.recipes.beta_bernoulli()).eval()
    with torch.no_grad():
        net[0].gate.raw_a[1] = -10.0
        assert (net[0](IMAGE)[:, 1] == 0).all()
    assert vd.relevance(net)["0.gate"].kept.tolist() == [True, False, True, True]


def test_group_gate_stands_beside_a_weight_posterior():
    net = vd.convert(nn.Sequential(nn.Linear(3, 2)), vd.recipes.bayesian_compression())
    own = sum(tensor.kl() for tensor in net[0].noisy_tensors().values())
    torch.testing.assert_close(vd.kl(net), own + net[0].gate.kl())
    torch.testing.assert_close(net[0].kl(), vd.kl(net))
    assert set(vd.relevance(net)) == {"0", "0.gate"}


# ---- MC dropout


@pytest.mark.parametrize("kind", vd.gates.DROPOUT_TYPES)
def test_every_torch_dropout_becomes_switchable_and_draws_what_torch_draws(kind):
    plain = nn.Sequential(kind(0.4)).eval()
    x = {nn.Dropout1d: IMAGE.squeeze(1), nn.Dropout3d: IMAGE.unsqueeze(1)}.get(kind, IMAGE)
    expected, drawn = plain(x), replay(plain.train(), x)
    net = vd.convert(copy.deepcopy(plain), vd.recipes.mc_dropout()).eval()
    assert torch.equal(net(x), expected)
    with vd.sampling(net):
        assert torch.equal(replay(net, x), drawn)
        assert any(not torch.equal(net(x), net(x)) for _ in range(16))
    with vd.sampling(net.train(), on=False):
        assert torch.equal(net(x), expected)
    assert net[0].p == 0.4
    assert type(vd.revert(net)[0]) is kind


def test_gates_are_inserted_where_the_net_has_no_dropout():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    vd.convert(net, vd.recipes.mc_dropout(drop_rate=0.25), include="2")
    assert net[2].gate.noise == vd.BinaryDropout(0.25)
    assert type(net[0]) is nn.Linear


# ---- S3: dropout is variational inference


def test_gate_and_bernoulli_posterior_agree_on_the_same_mask():
    plain = nn.Linear(5, 3)
    gate = vd.convert(copy.deepcopy(plain), vd.binary_dropout(0.5))
    recipe = vd.Recipe(vd.posteriors.Bernoulli(0.5, per="input"), estimator=vd.weight_sample)
    posterior, x = vd.convert(copy.deepcopy(plain), recipe), torch.randn(1, 5)
    a, b = replay(gate, x), replay(posterior, x)
    assert torch.equal(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    assert torch.equal(gate.weight.grad, posterior.weight.grad)


@pytest.mark.parametrize(("rate", "length", "tau"), [(0.1, 1e-2, 2.5), (0.5, 3.0, 0.1)])
def test_regulariser_is_the_kl_of_length_scale_and_precision(rate, length, tau):
    # loss / tau = 1/2 (y - f)^2 + lambda |M|^2 + const, lambda = l^2 (1 - p) / (2 N tau).
    net = vd.convert(nn.Linear(5, 1), vd.recipes.mc_dropout(rate, length_scale=length)).eval()
    elbo = vd.ELBO(net, vd.Gaussian(std=tau**-0.5), num_data=40)
    x, y = torch.randn(8, 5), torch.randn(8, 1)
    out, square = elbo(x, y), 0.5 * (y - net(x)).square().mean()
    constant = 0.5 * torch.log(torch.tensor(2 * torch.pi / tau)) / tau
    kept = net.weight / (1 - rate)  # where a weight stands when it is kept
    decay = length**2 * (1 - rate) / (2 * 40 * tau) * kept.square().sum()
    torch.testing.assert_close(out.loss / tau, square + constant + decay)
    q, p = vd.posteriors.Bernoulli(rate, per="input"), vd.Normal(std=1 / length)
    twin = vd.convert(nn.Linear(5, 1), vd.Recipe(q, p, vd.weight_sample))
    twin.load_state_dict(net.state_dict())
    torch.testing.assert_close(vd.kl(twin), out.kl)


# ---- stages


def test_dependent_gates_take_over_frozen_base_gates():
    net = vd.convert(conv_net(), vd.recipes.beta_bernoulli())
    raw_a = net[0].gate.raw_a
    raw_a.data.copy_(torch.tensor([3.0, -10.0, 1.0, 2.0]))
    before = vd.kl(net)
    vd.convert(net, vd.recipes.dependent_beta_bernoulli())
    assert net[0].gate.raw_a is raw_a
    assert not raw_a.requires_grad
    assert vd.kl(net) < before  # the frozen part is a constant and left out
    net(IMAGE)
    (net(IMAGE).square().mean() + vd.kl(net) / 100).backward()
    assert raw_a.grad is None
    assert torch.isfinite(net[0].gate.shift.grad).all()
    assert vd.relevance(net)["0.gate"].kept.tolist() == [True, False, True, True]
    assert id(raw_a) not in {id(p) for g in vd.parameter_groups(net) for p in g["params"]}


def test_a_gate_on_top_of_gates_needs_them_and_leaves_the_weights_to_their_method():
    told, dependent = "no Beta-Bernoulli gate to build on", vd.recipes.dependent_beta_bernoulli()
    assert_refused(told, vd.convert, conv_net(), dependent)
    net = vd.convert(conv_net(), vd.recipes.beta_bernoulli())
    recipe = vd.Recipe(vd.AdditiveGaussian(), gate=vd.DependentBetaBernoulli())
    assert_refused("no `posterior` with a gate that takes over", vd.convert, net, recipe)
    assert net[0].gate.noise == vd.BetaBernoulli()
    plan = vd.plan(net, vd.recipes.dependent_beta_bernoulli())
    assert "-> its gate is taken over by DependentBetaBernoulli" in str(plan)


# ---- revert and errors


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize("make, recipe, match", [
    (conv_net, vd.recipes.standout(), "depends on its input"),
    (conv_net, vd.recipes.dependent_beta_bernoulli(joint=True), "depends on its input"),
    (tied, vd.recipes.beta_bernoulli(), "tied weights"),
])  # fmt: skip
def test_revert_refuses_gates_that_do_not_fold(make, recipe, match):
    net = vd.convert(make(), recipe)
    with unchanged(net, match=match):
        vd.revert(net)


@pytest.mark.parametrize("layer, match", [
    (lambda: nn.BatchNorm1d(3), "no weights that can be noisy"),
    (lambda: nn.Embedding(3, 2), "an index has no features to gate"),
    (lambda: nn.Conv2d(0, 2, 1), "no units to gate"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_units_takes_no_gate(layer, match):
    assert_refused(match, vd.convert, nn.Sequential(layer()), vd.recipes.beta_bernoulli())


# Gates inside layers: their mean folds into the weights, also where units differ.


FOLDED = [n for n, r in RECIPES.items() if r.gate is not None and not r.gate.input_dependent]


@pytest.mark.parametrize("recipe", FOLDED)
@pytest.mark.parametrize("layer", ["linear", "bilinear", "conv1d", "conv2d_depthwise", "conv2d_reflect", "transposed1d", "transposed2d"])  # fmt: skip
def test_revert_folds_the_mean_of_the_gate(layer, recipe):
    case = LAYERS[layer]
    net, inputs = vd.convert(case.make(), RECIPES[recipe]).eval(), case.inputs()
    with torch.no_grad():
        for tensor in net.gate.parameters():  # units that differ
            tensor.add_(0.3 * torch.randn_like(tensor))
        expected, plain = net(*inputs), vd.revert(net)
        assert type(plain) is type(case.make())
        torch.testing.assert_close(plain(*inputs), expected, rtol=1e-4, atol=1e-5)
