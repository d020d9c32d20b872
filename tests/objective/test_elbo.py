import copy
import importlib

import pytest
import torch
from torch import nn
from torch._functorch import config

import vardrop as vd
from tests.nets import Parts
from tests.pairs import PAIRS, slow_but
from tests.refusals import assert_refused
from tests.replay import replay
from vardrop.testing import HEADS, LAYERS, RECIPES, RECURRENT

X, Y = torch.randn(8, 4), torch.randint(3, (8,))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile


def noisy():
    return vd.convert(nn.Linear(4, 3), vd.sparse_vd(log_sigma2=-3.0))


def test_parts_add_up():
    elbo = vd.ELBO(noisy(), vd.Categorical(), num_data=50, beta=0.3)
    out = elbo(X, Y)
    torch.testing.assert_close(out.loss, out.nll + 0.3 * out.kl / 50)
    torch.testing.assert_close(out.kl, vd.kl(elbo.net))
    assert float(out.beta) == pytest.approx(0.3)
    plain = vd.ELBO(nn.Linear(4, 3), vd.Categorical(), num_data=5, beta=0.0)(X, Y)
    torch.testing.assert_close(plain.loss, plain.nll)
    assert float(plain.kl) == 0.0


FIRST = [nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True), Parts(lambda _, x: x.add_(1))]


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("first", FIRST, ids=["dropout", "relu", "own"])
def test_a_net_that_begins_in_place_leaves_the_input_alone(first, samples):
    net = nn.Sequential(first, nn.Linear(4, 3))
    vd.convert(net, vd.sparse_vd(log_sigma2=-30.0))
    elbo, x = vd.ELBO(net, vd.Categorical(), num_data=50, samples=samples), X.clone()
    found = replay(elbo, x, Y)
    assert torch.equal(x, X)
    draws = replay(lambda: [vd.Categorical()(net(X.clone()), Y) for _ in range(samples)])
    torch.testing.assert_close(found.nll, sum(draws) / samples, rtol=1e-5, atol=1e-5)


def test_inputs_in_a_structure_are_left_alone_too():
    run = lambda net, batch: net.layer(batch["x"].mul_(0) + batch["rest"][0].add_(1))
    net = vd.convert(Parts(run, layer=nn.Linear(4, 3)), vd.sparse_vd())
    elbo = vd.ELBO(net, vd.Categorical(), num_data=50, samples=2)
    batch = {"x": X.clone(), "rest": (X.clone(),), "name": "a"}
    elbo(batch, Y)
    assert torch.equal(batch["x"], X)
    assert torch.equal(batch["rest"][0], X)


def test_schedules():
    warm = vd.linear_warmup(5, 20)
    assert [warm(e) for e in (0, 5, 20, 100)] == [0.0, 0.0, 1.0, 1.0]
    assert (vd.cyclical(10, rise=1.0)(25), vd.constant(0.2)(7)) == (pytest.approx(0.5), 0.2)


def test_parameter_groups_keep_decay_off_the_noise():
    net = nn.Sequential(noisy(), nn.BatchNorm1d(3))
    elbo = vd.ELBO(net, vd.Gaussian(learned=True), num_data=5)
    weights, noise = vd.parameter_groups(elbo, lr=1e-3, noise_lr=1e-2, weight_decay=1e-4)
    assert noise["params"] == [net[0].log_sigma2]
    assert (noise["weight_decay"], noise["lr"]) == (0.0, 1e-2)
    assert (weights["weight_decay"], weights["lr"], len(weights["params"])) == (1e-4, 1e-3, 5)
    torch.optim.AdamW([weights, noise])


def test_losses_that_mix_or_sum_examples_are_refused():
    column = torch.zeros(3, 1)
    assert_refused("broadcasting would mix examples", vd.Gaussian(), column, torch.zeros(3))
    assert_refused("even last axis", vd.HeteroscedasticGaussian(), torch.zeros(3, 3), column)
    elbo = vd.ELBO(noisy(), nn.CrossEntropyLoss(reduction="sum"), 8)
    assert_refused("a mean over examples", elbo, X, Y)
    assert bool(vd.ELBO(noisy(), nn.CrossEntropyLoss(), 8)(X, Y).loss.isfinite())


def test_a_head_over_positions_needs_the_classes_last():
    x = torch.randint(7, (12, 6))
    net = torch.nn.Sequential(torch.nn.Embedding(7, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5))
    vd.convert(net, vd.dropmax())
    assert_refused("class_axis=-1", vd.ELBO(net, vd.Categorical(), 12), x, x % 5)
    elbo = vd.ELBO(net, vd.Categorical(class_axis=-1), 12)
    elbo(x, x % 5).loss.backward()
    torch.testing.assert_close(vd.predict(elbo, x, 8, seed=0).probs.sum(-1), torch.ones(12, 6))


compiling = importlib.import_module("vardrop.objective.compile")  # the package has a function too
COMPILED_X, COMPILED_Y = torch.randn(8, 6), torch.randint(3, (8,))


def make(every=1):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    net = vd.convert(net, vd.sparse_vd(log_sigma2=-3.0))
    return vd.ELBO(net, vd.Categorical(), num_data=20, kl_value_every=every)


def train(elbo, step):
    losses = []
    for beta in (0.5, 1.0, 1.0):
        elbo.set_beta(beta)
        losses.append(step(COMPILED_X, COMPILED_Y))
    return losses, [p.detach() for p in elbo.parameters()]


def plain(elbo, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        out = elbo(x, y)
        out.loss.backward()
        optimizer.step()
        return out

    return step


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("compiler", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_step_is_the_plain_step(compiler, every, monkeypatch):
    if not compiler:
        monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
        monkeypatch.setattr(torch, "compile", lambda *a, **k: pytest.fail("there is no compiler"))
    elif not compiling._has_compiler(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    elbo = make(every)
    other = copy.deepcopy(elbo)
    optimizer, others = (torch.optim.Adam(e.parameters(), lr=0.01) for e in (elbo, other))
    mine = replay(train, elbo, vd.compile(elbo, optimizer))
    theirs = replay(train, other, plain(other, others))
    for a, b in zip(mine[0], theirs[0], strict=True):
        torch.testing.assert_close(a[:4], tuple(p.detach() for p in b[:4]), rtol=5e-5, atol=1e-6)
        assert not a.loss.requires_grad
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-5)


def test_every_net_has_a_code_object_of_its_own(monkeypatch):
    # The compiler keeps eight versions of a code object, and runs further nets as they are.
    seen = []
    monkeypatch.setattr(compiling, "_has_compiler", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda f, **_: seen.append(f.__code__) or f)
    elbos = [make() for _ in range(3)]
    for elbo in elbos:
        step = vd.compile(elbo, torch.optim.Adam(elbo.parameters()))
        assert step(COMPILED_X, COMPILED_Y).loss.isfinite()
    assert len(set(seen)) == 3


def test_torch_compile_leaves_out_the_value_of_the_kl_too():
    elbo, values = make(every=3), []
    step = torch.compile(elbo, backend="eager")
    for _ in range(4):
        found = [replay(f, COMPILED_X, COMPILED_Y) for f in (step, elbo.parts)]
        gradients = [torch.autograd.grad(o.loss, elbo.net[0].weight)[0] for o in found]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        values.append(float(found[0].kl.detach()))
        elbo.net[0].log_sigma2.data.add_(0.5)
    assert elbo._step == 4
    assert values[0] == values[1] == values[2] != values[3]
    torch.testing.assert_close(elbo.eval()(COMPILED_X, COMPILED_Y).kl, vd.kl(elbo.net))


def test_one_graph_cannot_leave_out_the_value_of_the_kl():
    step = torch.compile(make(every=3), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kl_value_every=1 with fullgraph"):
        step(COMPILED_X, COMPILED_Y)


@pytest.mark.parametrize("recipe", slow_but(RECIPES, "sparse_vd"))
def test_shapes_may_be_dynamic(recipe):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    elbo = vd.ELBO(vd.convert(net, RECIPES[recipe]), vd.Categorical(), num_data=20)
    step = torch.compile(elbo, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (8, 5):
        mine, expected = (replay(f, COMPILED_X[:rows], COMPILED_Y[:rows]) for f in (step, elbo))
        torch.testing.assert_close(mine.loss, expected.loss, rtol=1e-4, atol=1e-5)
        mine.loss.backward()


# Other devices, as far as a CPU can show them: shapes, no look at values, no kernel of the CPU.


@pytest.mark.parametrize("layer, recipe", PAIRS)
def test_a_step_on_the_meta_device(layer, recipe):
    """Whatever looked at a value, or drew on another device, would raise."""
    noisy = vd.convert(LAYERS[layer].make(), (RECIPES | RECURRENT)[recipe]).to("meta")
    output = noisy(*(x.to("meta") for x in LAYERS[layer].inputs()))
    output = output[0] if isinstance(output, tuple) else output
    loss = output.sum() + vd.kl(noisy)
    assert loss.is_meta
    if loss.requires_grad:
        loss.backward()
    grads = [p.grad for p in noisy.parameters() if p.grad is not None]
    assert all(g.is_meta for g in grads)
    assert len(grads) > 0 or not loss.requires_grad


@pytest.mark.parametrize("name", RECIPES | HEADS)
def test_a_classifier_on_the_meta_device(name):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    elbo = vd.ELBO(vd.convert(net, (RECIPES | HEADS)[name]), vd.Categorical(), 10).to("meta")
    x, y = torch.empty(8, 3, 8, 8, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
    elbo(x, y).loss.backward()
    assert all(p.grad.is_meta for p in elbo.parameters() if p.grad is not None)


@pytest.mark.parametrize("budget", [0.0, 0.9])
def test_compile_refuses_to_draw_twice(budget):
    elbo, told = make(), "activation_memory_budget to be 1, but got"
    with config.patch(activation_memory_budget=budget):
        assert_refused(told, vd.compile, elbo, torch.optim.Adam(elbo.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("net", [nn.Linear(6, 4), nn.Conv2d(2, 3, 3)], ids=["dense", "conv"])
def test_gradients_do_not_depend_on_autocast_around_backward(net, dtype):
    """Products of variances in half precision would vanish."""
    net = vd.convert(copy.deepcopy(net), vd.sparse_vd())
    x = torch.randn(8, 6) if hasattr(net, "in_features") else torch.randn(4, 2, 6, 6)
    found = []
    for inside in (False, True):
        loss = replay(net, x).square().sum()
        with torch.autocast("cpu", dtype, enabled=inside):
            found.append(torch.autograd.grad(loss, list(net.parameters())))
    torch.testing.assert_close(*found, rtol=0, atol=0)
