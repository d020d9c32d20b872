"""DropMax and its baselines: formulas, masks, extremes, conversion, the ELBO, bad input."""

import copy
import pickle
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, kl_divergence
from torch.nn import functional

import vardrop as vd
from tests.nets import Parts, digits, reload
from tests.refusals import assert_refused
from tests.replay import replay
from tests.z_scores import assert_mean, z_bound
from vardrop import heads, recipes
from vardrop.heads import DropMaxRule, Head
from vardrop.heads.rules import sparsemax
from vardrop.testing import HEADS
from vardrop.tuning import train

RULES = [recipe.rule for recipe in HEADS.values()]
H, Y = torch.randn(8, 5), torch.randint(4, (8,))


# ---- DropMax, term by term


def test_loss_is_the_papers_objective():
    torch.manual_seed(1)
    head, h = Head(5, 4, DropMaxRule()).double(), H.double()
    o, a, r = (functional.linear(h, m.weight, m.bias) for m in (head, head.retain, head.correction))
    rho, g, target = torch.sigmoid(a), torch.sigmoid(a + r), functional.one_hot(Y, 4).bool()
    kl = torch.where(target, -rho.log(), kl_divergence(Bernoulli(g), Bernoulli(rho))).sum(1).mean()
    aux = functional.binary_cross_entropy(torch.sigmoid(r), target.double(), reduction="none")
    entropy, out = Bernoulli(rho).entropy().sum(1).mean(), head.loss(h, Y)
    torch.testing.assert_close(out.kl, kl)
    torch.testing.assert_close(out.aux, aux.sum(1).mean())
    torch.testing.assert_close(out.entropy, entropy)
    torch.testing.assert_close(out.loss, out.nll + kl + aux.sum(1).mean() - entropy)
    one_pass = (rho * o.exp()) / (rho * o.exp()).sum(1, keepdim=True)
    torch.testing.assert_close(head.eval()(h).exp(), one_pass)
    torch.testing.assert_close(head.retain_probability(h), rho)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_objective_is_per_example(rule):
    """Summed over the positions of an example, averaged over examples."""
    head, h, y = Head(5, 4, rule), torch.randn(6, 3, 5), torch.randint(4, (6, 3))
    found = replay(head.loss, h, y)
    apart = replay(head.loss, h.flatten(0, 1), y.flatten())  # each position an example of its own
    torch.testing.assert_close(tuple(found), tuple(3 * part for part in apart))


def test_the_gradient_stops_inside_g_and_kl_and_entropy_move_both_branches():
    head = dropmax()
    out, retain, correction = head.loss(H, Y), head.retain.weight, head.correction.weight

    options = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
    moves = lambda term, weight: torch.autograd.grad(term, weight, **options)[0].any()

    assert not moves(out.nll, retain), "the likelihood moves rho"
    assert moves(out.nll, correction)
    assert moves(out.kl, retain)
    assert moves(out.kl, correction) & moves(out.entropy, retain)


def test_kl_is_zero_where_q_is_p_and_the_target_is_sure_and_the_target_is_always_kept():
    head = dropmax()
    for p in (*head.retain.parameters(), *head.correction.parameters()):
        p.data.zero_()
    head.retain.bias.data.fill_(30.0)
    assert head.loss(H, Y).kl.abs() < 1e-10
    head.retain.bias.data.fill_(-1e4)  # every class is dropped almost surely
    assert head.loss(H, Y).nll < 1e-6


def test_likelihood_under_masks_matches_its_analytic_mean():
    # Two classes, hard masks: the other class is kept with probability g.
    head = Head(5, 2, DropMaxRule(temperature=1e-4)).double()
    h, y = torch.randn(1, 5).double(), torch.tensor([1])
    o, a, r = (functional.linear(h, m.weight, m.bias) for m in (head, head.retain, head.correction))
    expected = torch.sigmoid(a + r)[0, 0] * -torch.log_softmax(o, 1)[0, 1]
    draws = torch.vmap(lambda _: head.loss(h, y).nll, randomness="different")(torch.empty(4000))
    assert_mean(draws.detach(), expected.detach())


def test_monte_carlo_probabilities_match_enumeration():
    head, h = Head(5, 2, DropMaxRule(temperature=1e-4)).double().eval(), torch.randn(1, 5).double()
    with torch.no_grad():
        o, a = (functional.linear(h, m.weight, m.bias)[0] for m in (head, head.retain))
        rho = torch.sigmoid(a)
        # With both classes dropped, the one whose relaxed mask is larger takes all.
        grid = torch.linspace(-40, 0, 40_001).double()
        density = torch.sigmoid(grid - a[0]) * torch.sigmoid(a[0] - grid)
        first_wins = torch.trapezoid(density * torch.sigmoid(grid - a[1]), grid)
        alone, both = rho[0] * (1 - rho[1]), rho.prod()
        expected = alone + both * torch.softmax(o, 0)[0] + first_wins
        with vd.sampling(head):
            draws = torch.vmap(lambda _: head(h), randomness="different")(torch.empty(4000))
        draws, average = draws.exp()[:, 0, 0], head(h, samples=4000).exp()
    assert_mean(draws, expected)
    assert (average.sum() - 1).abs() < 1e-9
    assert (average[0, 0] - expected).abs() < z_bound(1) * draws.std() / 4000**0.5


def test_prior_inference_has_no_kl():
    out = Head(5, 4, DropMaxRule(inference="p")).loss(H, Y)
    assert out.kl == out.aux == out.entropy == 0
    torch.testing.assert_close(out.loss, out.nll)


# ---- baselines


def test_sampled_softmax_uses_the_target_and_a_fraction():
    y, logits = torch.arange(6), torch.randn(6, 10)
    some, full = (Head(5, 10, heads.SampledSoftmaxRule(fraction=f)).rule for f in (0.4, 1.0))
    found = some.loss(torch.zeros(6, 10), {}, y).nll
    assert found.item() == pytest.approx(torch.tensor(4.0).log().item())
    torch.testing.assert_close(full.loss(logits, {}, y).nll, functional.cross_entropy(logits, y))


def test_class_dropout_keeps_the_target():
    rule = Head(5, 1000, heads.ClassDropoutRule(drop_rate=0.6)).rule
    y = torch.zeros(200, dtype=torch.long)
    kept = rule.loss(torch.zeros(200, 1000), {}, y).nll.exp().item()
    assert kept == pytest.approx(1 + 999 * 0.4, rel=0.02)  # exp of a mean log: 0.02 is 10 errors


def test_sparsemax_is_the_projection_onto_the_simplex():
    logits = 3 * torch.randn(50, 6, dtype=torch.float64)
    p, _ = sparsemax(logits)
    torch.testing.assert_close(p.sum(1), torch.ones(50).double())
    assert (p >= 0).all()
    # Optimality: for any q in the simplex, (q - p) (logits - p) <= 0.
    q = torch.distributions.Dirichlet(torch.ones(6).double()).sample((50,))
    assert ((q - p) * (logits - p)).sum(1).max() < 1e-12


def test_sparsemax_loss_has_its_published_gradient():
    head = Head(5, 6, heads.SparsemaxRule())
    logits = (3 * torch.randn(7, 6, dtype=torch.float64)).requires_grad_()
    y = torch.randint(6, (7,))
    gradient = torch.autograd.grad(head.rule.loss(logits, {}, y).nll, logits)[0]
    torch.testing.assert_close(gradient, (sparsemax(logits)[0] - functional.one_hot(y, 6)) / 7)


# ---- every head


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_no_overflow_for_huge_logits(rule, autocast):
    head = Head(2, 4, rule)
    for p in head.parameters():
        p.data.copy_(1e4 * torch.randn_like(p).sign())
    h = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 0.5]], requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, log_probs = head.loss(h, torch.tensor([0, 1, 3])), head.eval()(h)
    assert all(torch.isfinite(term) for term in out)
    assert (log_probs.exp().sum(1) - 1).abs().max() < 1e-3
    out.loss.backward()
    assert torch.isfinite(h.grad).all()
    for name, p in head.named_parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_contract(rule):
    head = Head(5, 4, rule)
    expected = replay(head.loss, H, Y).loss
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(replay(twin.loss, H, Y).loss, expected)
    head.eval()
    assert torch.equal(head(H), head(H)), "noise in mean mode"
    assert (head(H).exp().sum(1) - 1).abs().max() < 1e-5
    assert (head(H, samples=3).shape, head.retain_probability(H).shape) == ((8, 4), (8, 4))
    assert not head.training
    torch.testing.assert_close(torch.export.export(head, (H,)).module()(H), head(H))
    with vd.sampling(head), torch.no_grad():
        draws = torch.vmap(lambda _: head(H), randomness="different")(torch.empty(16))
    assert draws.shape == (16, 8, 4)
    assert torch.equal(draws[0], draws[1]) == (not isinstance(rule, DropMaxRule))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_elbo_drives_the_head_and_logs_its_parts(rule):
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Head(6, 4, rule))
    out = vd.ELBO(net, vd.Categorical(), num_data=8, samples=2)(H, Y)
    assert out.head is not None
    torch.testing.assert_close(out.loss, out.head.loss)
    torch.testing.assert_close(out.nll, out.head.nll)
    out.loss.backward()
    assert all(p.grad is not None for p in net.parameters())
    assert net(H).shape == (8, 4)


def test_elbo_drives_noisy_layers_below_a_head():
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    vd.convert(net, recipes.dropmax(), include="2")
    vd.convert(net, vd.sparse_vd(), include="0")
    out = vd.ELBO(net, vd.Categorical(), num_data=8)(H, Y)
    assert out.kl > 0
    torch.testing.assert_close(out.loss, out.head.loss + out.kl / 8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_elbo_with_a_head_compiles_into_one_graph(rule):
    elbo = elbo_of(nn.Linear(5, 6), nn.ReLU(), Head(6, 4, rule))
    torch.compile(elbo, fullgraph=True, backend="eager")(H, Y).loss.backward()
    assert all(p.grad is not None for p in elbo.parameters())


# ---- conversion


def test_convert_replaces_the_named_layer_and_keeps_its_weights():
    net = nn.Sequential(OrderedDict(body=nn.Linear(5, 6), relu=nn.ReLU(), fc=nn.Linear(6, 4)))
    weight, state = net.fc.weight, copy.deepcopy(net.state_dict())
    vd.convert(net, recipes.dropmax(), include="fc")
    assert [type(m) for m in net] == [nn.Linear, nn.ReLU, Head]
    assert net.fc.rule == heads.DropMaxRule()
    assert net.fc.weight is weight
    assert not net.load_state_dict(state, strict=False).unexpected_keys
    by_default = vd.convert(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)), recipes.dropmax())
    assert [type(m) for m in by_default] == [nn.Linear, Head]  # the last linear layer


@pytest.mark.parametrize("name", HEADS)
def test_heads_with_a_softmax_revert_to_linear_and_others_refuse(name):
    net = vd.convert(nn.Sequential(nn.Linear(5, 4)), HEADS[name]).eval()
    if name not in ("softmax", "class_dropout", "sampled_softmax"):
        assert_refused("Expected a head that is a softmax", vd.revert, net)
        return
    expected = net(H)
    assert type(vd.revert(net)[0]) is nn.Linear
    torch.testing.assert_close(torch.log_softmax(net(H), 1), expected)


def test_a_rule_of_your_own_needs_no_head_of_its_own(tmp_path):
    @dataclass(frozen=True)
    class Cold(heads.SoftmaxRule):
        temperature: float = 0.5
        linear: ClassVar[bool] = False

        def log_probs(self, logits, branches):
            return torch.log_softmax(logits / self.temperature, -1)

        def loss(self, logits, branches, y):
            return super().loss(logits / self.temperature, branches, y)

    recipe = vd.HeadRecipe(Cold(0.25))
    assert vd.from_json(vd.to_json(recipe)) == recipe
    net = vd.convert(nn.Sequential(nn.Linear(5, 4)), recipe)
    loss = vd.ELBO(net, vd.Categorical(), num_data=8)(H, Y).loss
    torch.testing.assert_close(loss, functional.nll_loss(net(H), Y))
    assert torch.equal(reload(net, nn.Sequential(nn.Linear(5, 4)), tmp_path)(H), net(H))
    assert_refused("a softmax of its linear layer, but got .*Cold", vd.revert, net)


def test_the_branches_take_no_weight_decay():
    net = vd.convert(nn.Sequential(nn.Linear(5, 4)), recipes.dropmax())
    weights, noise = vd.parameter_groups(net, weight_decay=1e-4)
    assert [len(g["params"]) for g in (weights, noise)] == [2, 4]


# ---- bad input


def dropmax():
    return Head(5, 4, DropMaxRule())


def elbo_of(*modules):
    return vd.ELBO(nn.Sequential(*modules), vd.Categorical(), 8)


@pytest.mark.parametrize("call, match", [
    (lambda: dropmax().loss(H, Y - 9), r"Expected `y` to be in 0\.\.3"),
    (lambda: dropmax().loss(H, Y[:3]), "Expected `y` to hold class indices"),
    (lambda: dropmax().loss(H, Y.float()), "Expected `y` to hold class indices"),
    (lambda: vd.convert(nn.Sequential(nn.Linear(5, 1)), recipes.dropmax()), "a head needs at least 2 classes"),
    (lambda: vd.convert(nn.Sequential(nn.Conv2d(1, 2, 3)), recipes.dropmax()), "a head takes the place of a linear"),
    (lambda: vd.ELBO(dropmax(), vd.Gaussian(), num_data=8), r"Expected `likelihood` to be Categorical\(\)"),
    (lambda: elbo_of(dropmax(), Head(4, 4, DropMaxRule())), "Expected at most one head"),
])  # fmt: skip
def test_bad_input(call, match):
    assert_refused(match, call)


def test_a_failed_pass_leaves_the_head_as_it_was():
    elbo = elbo_of(dropmax(), nn.LogSoftmax(1))
    assert_refused("Expected the head to be the last module", elbo, H, Y)
    assert elbo.net(H).shape == (8, 4)


def test_another_thread_gets_log_probabilities_while_the_objective_runs():
    """The objective asks for features; nobody else must get them from the same head."""

    def meanwhile(_, x):
        if threading.current_thread() is threading.main_thread():
            seen.append(pool.submit(elbo.net, H).result(20))
        return x

    elbo, seen = elbo_of(nn.Linear(5, 6), Parts(meanwhile), Head(6, 4, heads.SoftmaxRule())), []
    with ThreadPoolExecutor(1) as pool:
        loss = elbo(H, Y).loss
    expected = torch.log_softmax(elbo.net[2]._maps(elbo.net[0](H))[0], 1)
    assert torch.equal(seen[0], expected)
    torch.testing.assert_close(loss, functional.nll_loss(expected, Y))


def test_the_objective_sees_through_a_net_that_is_compiled():
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Head(6, 4, heads.SoftmaxRule()))
    compiled = torch.compile(net, backend="eager")
    expected, loss = compiled(H), vd.ELBO(compiled, vd.Categorical(), num_data=8)(H, Y).loss
    torch.testing.assert_close(loss, functional.nll_loss(expected, Y))
    assert torch.equal(compiled(H), expected)


def test_dropmax_learns_the_digits():
    x, y = digits()
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), Head(32, 10, DropMaxRule()))
    elbo = vd.ELBO(net, vd.Categorical(), num_data=1000)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-2)
    list(train(elbo, optimizer, x[:1000], y[:1000], 8, 100))
    x, y = x[1000:], y[1000:]
    assert (net.eval()(x).argmax(1) == y).float().mean() > 0.85
    retained, target = net[2].retain_probability(net[:2](x)), functional.one_hot(y, 10).bool()
    assert retained[target].mean() > retained[~target].mean() + 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sparsemax_of_many_narrow_classes(dtype):
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 1e-2).to(dtype)
    probs, _ = sparsemax(logits)
    expected, _ = sparsemax(logits.double())
    torch.testing.assert_close(probs.double(), expected, rtol=0, atol=float(torch.finfo(dtype).eps))
