"""The fused output of dense and convolutional layers against its parts, and where it stands back."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import vardrop as vd
from vardrop import functional as F

STRIDED = F.Convolution((2, 1), (1, 0), (1, 2), 2)
PRODUCTS = {  # the product, the same by torch, shapes of x, weight and output
    "dense": (F.Dense(), functional.linear, (5, 4), (3, 4), (5, 3)),
    "sequences": (F.Dense(), functional.linear, (2, 3, 4), (3, 4), (2, 3, 3)),
    "conv1d": (
        F.Convolution((1,), (1,), (1,), 1), lambda *a: functional.conv1d(*a, padding=1),
        (2, 2, 4), (3, 2, 3), (2, 3, 4),
    ),
    "conv2d": (
        STRIDED, lambda *a: functional.conv2d(*a, (2, 1), (1, 0), (1, 2), 2),
        (2, 2, 3, 4), (4, 1, 2, 2), (2, 4, 2, 2),
    ),
}  # fmt: skip


@pytest.fixture(params=PRODUCTS)
def case(request):
    product, op, rows, weights, outputs = PRODUCTS[request.param]
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows), torch.randn(weights), torch.randn(weights[0])
    variance, variance_bias = torch.rand(weights) + 0.1, torch.rand(weights[0]) + 0.1
    learned = (x, weight, bias, variance, variance_bias)
    tensors = [t.double().requires_grad_() for t in learned]
    return product, op, (*tensors, torch.randn(outputs, dtype=torch.float64))


def in_parts(op, x, weight, bias, variance, variance_bias, noise):
    return op(x, weight, bias) + op(x * x, variance, variance_bias).sqrt() * noise


def test_first_and_second_derivatives(case):
    product, _, arguments = case
    wave = lambda *a: F.fused_output(product, *a).sin()
    assert gradcheck(wave, arguments)
    assert gradgradcheck(wave, arguments)


@pytest.mark.parametrize("frozen", range(5))
def test_the_parts_and_what_needs_no_gradient(case, frozen):
    product, op, arguments = case
    arguments[frozen].requires_grad_(False)
    learned = [t for t in arguments if t.requires_grad]
    fused, parts = F.fused_output(product, *arguments), in_parts(op, *arguments)
    torch.testing.assert_close(fused, parts)
    slopes = [torch.autograd.grad(y.sin().sum(), learned) for y in (fused, parts)]
    torch.testing.assert_close(*slopes)


def test_no_bias(case):
    product, op, (x, weight, _, *rest) = case
    fused = F.fused_output(product, x, weight, None, *rest)
    torch.testing.assert_close(fused, in_parts(op, x, weight, None, *rest))


def test_noise_of_its_own(case):
    product, _, arguments = case
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        drawn = F.fused_output(product, *arguments[:-1])
        torch.manual_seed(5)
        given = F.fused_output(product, *arguments[:-1], torch.randn_like(arguments[-1]))
    torch.testing.assert_close(drawn, given)


def test_given_noise_is_left_alone(case):
    product, _, arguments = case
    before = arguments[-1].clone()
    F.fused_output(product, *arguments)
    assert torch.equal(arguments[-1], before)


def test_one_channel_keeps_the_layout_of_its_kernel():
    net = vd.convert(nn.Conv2d(1, 6, 3), vd.sparse_vd()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8)
    plain = functional.conv2d(x, net.weight, net.bias)
    for estimator in (vd.local_reparameterization, vd.weight_sample, vd.flipout):
        net.estimator = estimator
        assert net(x).stride() == plain.stride(), estimator
