"""One pass over the weights for all draws and the KL gives the gradient of the two apart."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import vardrop as vd
from tests.nets import Parts
from tests.refusals import assert_refused
from tests.replay import replay
from vardrop.posteriors import Axes

RECIPES = {
    "local": vd.sparse_vd(log_sigma2=-3.0),
    "draws": vd.Recipe(vd.AdditiveGaussian(-3.0), vd.LogUniform(), vd.weight_sample),
    "flipout": vd.Recipe(vd.AdditiveGaussian(-3.0), vd.LogUniform(), vd.flipout),
    "normal": vd.bayes_by_backprop(log_sigma2=-3.0), "ard": vd.ard(log_sigma2=-3.0),
    "sigmoid": vd.sparse_vd(log_sigma2=-3.0, form="sigmoid"),
    "clipped": vd.sparse_vd(log_sigma2=-3.0, train_clip=3.0),
    "learned": vd.bayes_by_backprop(vd.Normal(learned=True), log_sigma2=-3.0),
}  # fmt: skip


def twice():
    """Uses one layer twice, and ends in a layer whose weight is tied to it."""
    run = lambda net, x: net.tied(torch.relu(net.layer(torch.relu(net.layer(x)))))
    net = Parts(run, layer=nn.Linear(6, 6), tied=nn.Linear(6, 6, bias=False))
    net.tied.weight = net.layer.weight
    return net


def dense():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())


def last(net):
    return net.to(memory_format=torch.channels_last)


NETS = {
    "dense": (dense, torch.randn(7, 6)),
    "twice": (twice, torch.randn(7, 6)),
    "convolution": (convolution, torch.randn(7, 3, 6, 6)),
    "channels-last": (lambda: last(convolution()), last(torch.randn(7, 3, 6, 6))),
}
Y = torch.randint(4, (7,))


def gradients(loss, net):
    found = torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad])
    return torch.cat([g.flatten() for g in found])


def apart(net, x, samples, num_data):
    """The loss with nothing shared between the draws and the KL, from the same noise."""
    fits = [vd.Categorical()(net(x), Y) for _ in range(samples)]
    return sum(fits) / samples + vd.kl(net) / num_data


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make, x", NETS.values(), ids=NETS)
def test_gradients_are_those_of_draws_and_kl_apart(make, x, recipe, samples):
    net = vd.convert(make(), RECIPES[recipe])
    elbo = vd.ELBO(net, vd.Categorical(), num_data=9, samples=samples)
    out, loss = replay(elbo, x, Y), replay(apart, net, x, samples, 9)
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(out.loss, net), gradients(loss, net), rtol=1e-4, atol=1e-6)
    learned = [p for p in net.parameters() if p.requires_grad]
    direction = [torch.randn_like(p) for p in learned]

    def product():
        """The second derivative in a direction."""
        first = torch.autograd.grad(replay(elbo, x, Y).loss, learned, create_graph=True)
        inner = sum((g * v).sum() for g, v in zip(first, direction, strict=True))
        return torch.cat([h.flatten() for h in torch.autograd.grad(inner, learned)])

    mine = product()
    with vd.reference():
        exact = product()
    assert float((mine - exact).norm() / exact.norm()) <= 1e-4


def test_gradients_accumulate_and_a_graph_may_be_used_again():
    net, x = vd.convert(dense(), RECIPES["local"]), NETS["dense"][1]
    elbo = vd.ELBO(net, vd.Categorical(), num_data=9)
    losses = [elbo(x, Y).loss for _ in range(2)]
    for loss in losses:
        loss.backward(retain_graph=True)
    gathered = torch.cat([p.grad.flatten() for p in net.parameters()])
    torch.testing.assert_close(gathered, sum(gradients(loss, net) for loss in losses))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("value", [True, False])
def test_kl_alone_against_float64(value, transposed):
    weight, log_sigma2 = torch.randn(300, 301), 4 * torch.randn(300, 301) - 3
    if transposed:
        weight = weight.T.contiguous().T
    weight, log_sigma2 = weight.requires_grad_(), log_sigma2.requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (weight, log_sigma2)]
    mine = vd.functional.log_uniform_kl_additive(weight, log_sigma2, value=value)
    exact = vd.functional.log_uniform_kl_additive(*wide)
    if value:
        assert float(mine.detach()) == pytest.approx(float(exact.detach()), rel=2e-5)
    slopes = torch.autograd.grad(mine, (weight, log_sigma2)), torch.autograd.grad(exact, wide)
    for a, b in zip(*slopes, strict=True):
        nonzero = b.abs() > 1e-30
        assert float((a.double() / b - 1).abs()[nonzero].max()) <= 2e-5


NORMALS = vd.Normal(0.5, 0.3), vd.Normal(std=0.3, learned=True), vd.Normal("pretrained", 0.3)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("p", [vd.ARD(), *NORMALS])
def test_kl_to_normal_priors_in_blocks_against_float64(p, transposed):
    q, axes, found = vd.AdditiveGaussian(), Axes(input=(1,), output=(0,)), []
    weight, log_sigma2 = torch.randn(300, 301), 2 * torch.randn(300, 301) - 3
    hyper = p.initial(torch.randn(300, 301))
    if transposed:
        weight = weight.T.contiguous().T
    for dtype in (torch.float32, torch.float64):
        w, s, *rest = (t.to(dtype).requires_grad_() for t in (weight, log_sigma2, *hyper.values()))
        tensors = {"log_sigma2": s}, dict(zip(hyper, rest, strict=True))
        value = vd.kl_divergence(q, p, w, axes, *tensors)
        learned = [w, s, *(rest if p.learned else [])]
        found.append([value, *torch.autograd.grad(3 * value, learned)])
    for mine, exact in zip(*found, strict=True):
        assert float(((mine - exact).norm() / exact.norm()).detach()) <= 1e-5


def stopped(body, x):
    with torch.no_grad():
        target = body(x)
    return body(x) - target


def inferred(body, x):
    with torch.inference_mode():
        target = body(x).clone()
    return body(x) - target.mean().item()


def averaged(body, x):
    slow = {n: 0.5 * p.detach() for n, p in body.named_parameters()}
    return body(x) - functional_call(body, slow, (x,))


WAYS = {
    "plain": lambda body, x: body(x),
    "checkpointed": lambda body, x: checkpoint(body, x, use_reentrant=False),
    "reentrant": lambda body, x: checkpoint(body, x, use_reentrant=True),
    "plain and checkpointed": lambda body, x: body(x) + checkpoint(body, x, use_reentrant=False),
    "plain and reentrant": lambda body, x: body(x) + checkpoint(body, x, use_reentrant=True),
    "reentrant and plain": lambda body, x: checkpoint(body, x, use_reentrant=True) + body(x),
    "a pass without gradients first": stopped,
    "a pass in inference mode first": inferred,
    "other weights in the same layers": averaged,
}


@pytest.mark.parametrize("recipe", ["local", "draws", "normal"])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_does_not_depend_on_how_layers_run(way, recipe):
    net = Parts(lambda n, x: WAYS[way](n.body, x), body=vd.convert(dense(), RECIPES[recipe]))
    x = NETS["dense"][1].clone().requires_grad_()
    elbo, found = vd.ELBO(net, vd.Categorical(), num_data=9), []
    for objective in (elbo, elbo.parts):  # with and without sharing
        net.zero_grad()
        replay(objective, x, Y).loss.backward()
        found.append({n: p.grad for n, p in net.named_parameters()})
    assert all(g is not None for g in found[0].values())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_threads_share_nothing_with_each_other():
    net = vd.convert(dense(), RECIPES["local"])
    elbo, x = vd.ELBO(net, vd.Categorical(), num_data=9), NETS["dense"][1]
    for layer, noise in ((net[0], torch.randn(7, 5)), (net[2], torch.randn(7, 4))):
        held = lambda m, a, k, noise=noise: (a, {**k, "noise": noise})
        layer.register_forward_pre_hook(held, with_kwargs=True)
    expected = gradients(elbo(x, Y).loss, net)
    both, second_inside, first_done = threading.Barrier(2), threading.Event(), threading.Event()
    started = []

    def inside(*_):  # the second enters its step before the KL of the first, and leaves it after
        started.append(threading.get_ident())
        if len(started) == 1:
            assert second_inside.wait(30)
        else:
            second_inside.set()
            assert first_done.wait(30)

    net[1].register_forward_hook(inside)

    def step(_):
        loss = elbo(x, Y).loss
        first_done.set()
        both.wait(30)
        return gradients(loss, net)

    with ThreadPoolExecutor(2) as threads:
        for gradient in threads.map(step, range(2)):
            torch.testing.assert_close(gradient, expected)


def test_nothing_is_shared_outside_of_a_step():
    net = vd.convert(dense(), RECIPES["local"])
    elbo = vd.ELBO(net, vd.Categorical(), num_data=9)
    elbo(NETS["dense"][1], Y)
    assert_refused("`x` or `y`", elbo, torch.randn(7, 5), Y)
    assert vd.functional.shared_weights(net[0].weight, net[0].log_sigma2) is None
    with vd.functional.share_in_step():
        first = vd.functional.shared_weights(net[0].weight, net[0].log_sigma2)
        assert vd.functional.shared_weights(net[0].weight, net[0].log_sigma2) is first
