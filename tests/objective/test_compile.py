import copy
import importlib

import pytest
import torch
from torch import nn

import vardrop as vd
from vardrop.testing import RECIPES

compiling = importlib.import_module("vardrop.objective.compile")  # the package has a function too
X, Y = torch.randn(8, 6), torch.randint(3, (8,))


def make(every=1):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    net = vd.convert(net, vd.sparse_vd(log_sigma2=-3.0))
    return vd.ELBO(net, vd.Categorical(), num_data=20, kl_value_every=every)


def train(elbo, step):
    with torch.random.fork_rng():
        losses = []
        for beta in (0.5, 1.0, 1.0):
            elbo.set_beta(beta)
            losses.append(step(X, Y))
    return losses, [p.detach() for p in elbo.parameters()]


def plain(elbo, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        out = elbo(x, y)
        out.loss.backward()
        optimizer.step()
        return out

    return step


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
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
    mine = train(elbo, vd.compile(elbo, torch.optim.Adam(elbo.parameters(), lr=0.01)))
    theirs = train(other, plain(other, torch.optim.Adam(other.parameters(), lr=0.01)))
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
        assert vd.compile(elbo, torch.optim.Adam(elbo.parameters()))(X, Y).loss.isfinite()
    assert len(set(seen)) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
def test_torch_compile_leaves_out_the_value_of_the_kl_too():
    elbo, values = make(every=3), []
    step = torch.compile(elbo, backend="eager")
    for _ in range(4):
        found = []
        for objective in (step, elbo.parts):
            with torch.random.fork_rng():
                found.append(objective(X, Y))
        gradients = [torch.autograd.grad(o.loss, elbo.net[0].weight)[0] for o in found]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        values.append(float(found[0].kl.detach()))
        elbo.net[0].log_sigma2.data.add_(0.5)
    assert elbo._step == 4
    assert values[0] == values[1] == values[2] != values[3]
    assert float(elbo.eval()(X, Y).kl.detach()) == pytest.approx(float(vd.kl(elbo.net).detach()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
def test_one_graph_cannot_leave_out_the_value_of_the_kl():
    step = torch.compile(make(every=3), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kl_value_every=1 with fullgraph"):
        step(X, Y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inside torch.compile
@pytest.mark.parametrize(
    "recipe", [r if r == "sparse_vd" else pytest.param(r, marks=pytest.mark.slow) for r in RECIPES]
)
def test_shapes_may_be_dynamic(recipe):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    elbo = vd.ELBO(vd.convert(net, RECIPES[recipe]), vd.Categorical(), num_data=20)
    step = torch.compile(elbo, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (8, 5):
        with torch.random.fork_rng():
            mine = step(X[:rows], Y[:rows])
        with torch.random.fork_rng():
            expected = elbo(X[:rows], Y[:rows])
        torch.testing.assert_close(mine.loss, expected.loss, rtol=1e-4, atol=1e-5)
        mine.loss.backward()
