"""Bounds: the sum of the gradients of a parameter is what a bound stops."""

import copy
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import vardrop as vd
from tests.replay import replay
from vardrop import functional as F
from vardrop.functional import noise
from vardrop.functional.fast import additive, blocked_kl, switch

BELOW_ZERO = (-math.inf, 0.0)


def test_only_steps_out_of_the_range_stop():
    x = torch.tensor([-1.0, 0.0, 0.5, 0.5], requires_grad=True)
    direction = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    (F.clamp_with_gradient(x, *BELOW_ZERO) * direction).sum().backward()
    assert F.clamp_with_gradient(x, *BELOW_ZERO).tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert x.grad.tolist() == [-1.0, 0.0, 0.0, 1.0]


def test_the_sum_of_all_uses_is_judged():
    x = torch.zeros(2, requires_grad=True)
    first = F.clamp_with_gradient(x, *BELOW_ZERO) * torch.tensor([0.2, 1.2])
    (first + (F.clamp_with_gradient(x, *BELOW_ZERO) * torch.tensor([-1.2, -0.2]))).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0]  # apart they would give 0.2 and 1.2


def test_both_ends_and_two_ranges_of_one_parameter():
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    (F.clamp_with_gradient(x, -1.0, 1.0) * torch.tensor([1.0, -1.0])).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0]
    x.grad = None
    (F.clamp_with_gradient(x, -1.0, 2.0) * torch.tensor([-1.0, 1.0])).sum().backward()
    assert x.grad.tolist() == [-1.0, 1.0]


def test_a_parameter_has_one_hook_and_is_not_kept_alive():
    x = nn.Parameter(torch.zeros(2))
    for _ in range(5):
        F.clamp_with_gradient(x, *BELOW_ZERO)
    assert len(x._backward_hooks) == 1
    alive = weakref.ref(x)
    del x
    assert alive() is None


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_its_own_bound(twin):
    gate = vd.Gate(vd.GaussianDropout(1.0, max_alpha=1.0, prior=vd.LogUniform()), 3)
    gate.kl().backward()
    other = twin(gate)
    other.log_alpha.data.fill_(-1.0)
    other.zero_grad()
    other.kl().backward()
    assert (other.log_alpha.grad < 0).all()  # inside: the KL lets alpha grow
    assert (gate.log_alpha.grad == 0).all()


def test_no_parameter_no_hook():
    x = torch.zeros(3, requires_grad=True)
    (F.clamp_with_gradient(2 * x, *BELOW_ZERO) * -1.0).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0]
    slope = torch.func.grad(lambda t: -F.clamp_with_gradient(t, *BELOW_ZERO).sum())(torch.zeros(2))
    assert slope.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["B", "A"])
def test_alpha_at_its_bound_stays_while_data_and_prior_together_push_out(kind):
    net = vd.convert(nn.Linear(20, 10), vd.variational_dropout(kind, per="layer"))
    x, y = torch.randn(60, 20), torch.randint(10, (60,))
    noise = net.log_alpha if net.gate is None else net.gate.log_alpha

    def gradient(value, beta=1.0):
        noise.grad = None
        noise.data.fill_(value)
        vd.ELBO(net, vd.Categorical(), num_data=60, beta=beta)(x, y).loss.backward()
        return noise.grad.clone()

    for _ in range(20):
        free = replay(gradient, -1e-6)  # just inside: nothing is stopped
        torch.testing.assert_close(gradient(0.0), free.clamp(min=0.0), rtol=1e-3, atol=1e-3)
    assert (free < 0).all()
    assert (gradient(0.0, beta=0.0) > 0).all()  # the data alone push in: the terms disagree


# Fast paths against the plain expressions that they replace.


WEIGHTS = [torch.randn(40, 30), torch.randn(40, 30) - 3]
OUTPUTS = [torch.randn(6, 5), torch.rand(6, 5) + 0.1, torch.randn(6, 5)]


FAST = {
    "draws": (additive.additive_weights, lambda w, s: (w, s.exp()), 1e-5),
    "blocks": (F.log_uniform_kl_additive, blocked_kl.compiled_kl, 1e-5),
    # The expression for compilers has other fits. In double precision there is no fast path.
    "compiled": (blocked_kl.compiled_kl, lambda w, s: F.log_uniform_kl_additive(w.double(), s.double()).float(), 2e-5),
}  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_a_fast_path_is_its_reference(name):
    *functions, rtol = FAST[name]
    results = []
    for function in functions:
        inputs = [t.clone().requires_grad_() for t in WEIGHTS]
        out = function(*inputs)
        outputs = list(out[:2]) if isinstance(out, tuple) else [out]
        loss = sum((t * t).sum() for t in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*results, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("divergence, plain", [
    (blocked_kl.LOG_UNIFORM_KL, blocked_kl.compiled_kl),
    (blocked_kl.ARD_KL, lambda w, s: 0.5 * torch.log1p(w.square() / s.exp()).sum()),
    (blocked_kl.NormalKL(torch.zeros(1), torch.ones(1)), lambda w, s: 0.5 * (s.exp() + w * w - s).sum()),
])  # fmt: skip
def test_second_derivatives_of_shared_weights(divergence, plain):
    results = []
    for fast in (True, False):
        weight, log_sigma2 = (t.clone().requires_grad_() for t in WEIGHTS)
        mean, variance, kl = weight, log_sigma2.exp(), plain(weight, log_sigma2)
        if fast:
            shared = additive.additive_weights(weight, log_sigma2, divergence)
            mean, variance, kl = shared.mean, shared.variance, shared.kl()
        total = (mean * variance).sin().sum() + 1.5 * kl
        slopes = torch.autograd.grad(total, (weight, log_sigma2), create_graph=True)
        squares = sum(s.square().sum() for s in slopes)
        results.append((*slopes, *torch.autograd.grad(squares, (weight, log_sigma2))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_reference_switches_all_of_them_off():
    with vd.reference(), vd.reference():
        assert not switch.enabled
        assert additive.additive_weights(*WEIGHTS) is None
        assert not F.fast.normal_table.can_look_up(WEIGHTS[0])
        x, weight = torch.randn(2, 30), WEIGHTS[0].clone().requires_grad_()
        variances = WEIGHTS[1].exp(), torch.ones(40)
        assert noise.local_output(noise.linear, x, (weight, None), variances) is None
    assert switch.enabled


def test_derivatives_of_the_gaussian_output():
    arguments = [t.double().requires_grad_(i < 2) for i, t in enumerate(OUTPUTS)]
    wave = lambda *a: F.gaussian_output(*a).sin()
    assert gradcheck(wave, arguments)
    assert gradgradcheck(wave, arguments)


PRODUCTS = {
    "dense": (noise.linear, (5, 4), (3, 4)),
    "tokens": (noise.linear, (2, 3, 4), (3, 4)),
    "convolution": (noise.Convolution((2, 1), (1, 0), (1, 1), 2), (2, 4, 5, 4), (6, 2, 3, 2)),
    "one axis": (noise.Convolution((1,), (2,), (2,), 1), (2, 2, 6), (3, 2, 3)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op, shape, weight", PRODUCTS.values(), ids=PRODUCTS)
def test_a_local_output_and_its_derivatives(op, shape, weight, bias):
    numbers = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    x, mean = numbers(*shape).requires_grad_(), numbers(*weight).requires_grad_()
    variance = numbers(*weight).exp().requires_grad_()
    shift, spread = numbers(weight[0]).requires_grad_(), numbers(weight[0]).exp().requires_grad_()
    draw = torch.randn_like(op(x, mean, None))

    def fast(x, mean, variance, shift, spread):
        return noise.local_output(op, x, (mean, shift if bias else None), (variance, spread), draw)

    def plain(x, mean, variance, shift, spread):
        return op(x, mean, shift if bias else None) + op(x * x, variance, spread).sqrt() * draw

    tensors = x, mean, variance, shift, spread
    torch.testing.assert_close(fast(*tensors), plain(*tensors))
    assert gradcheck(fast, tensors)
    assert gradgradcheck(fast, tensors)
    before = draw.clone()
    fast(*tensors).sin().sum().backward()
    torch.testing.assert_close(draw, before, rtol=0, atol=0)
    found = [t.grad for t in tensors if t.grad is not None]
    learned = [t for t in tensors if t.grad is not None]
    wanted = torch.autograd.grad(plain(*tensors).sin().sum(), learned)
    torch.testing.assert_close(found, list(wanted))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("recipe", [vd.sparse_vd(), vd.l0(), vd.bayes_by_backprop(estimator=vd.weight_sample)])  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 5, 3, 4), (0, 3, 4)])
def test_an_output_over_positions_can_be_changed_in_place(shape, recipe, training):
    layer = vd.convert(nn.Linear(4, 3), recipe).train(training)
    attention = vd.convert(nn.MultiheadAttention(4, 2, batch_first=True), recipe).train(training)
    x = torch.randn(shape, requires_grad=True)
    layer(x).relu_().sum().backward()
    if len(shape) == 3 and len(x):
        attention(x, x, x)[0].relu_().sum().backward()
    assert x.grad.isfinite().all()


def test_one_channel_keeps_the_layout_of_its_kernel():
    net = vd.convert(nn.Conv2d(1, 6, 3), vd.sparse_vd()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8)
    plain = functional.conv2d(x, net.weight, net.bias)
    for estimator in (vd.local_reparameterization, vd.weight_sample, vd.flipout):
        net.estimator = estimator
        assert net(x).stride() == plain.stride(), estimator
