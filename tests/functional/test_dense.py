"""The fused output of a dense layer against its parts, and where it must stand back."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import vardrop as vd
from vardrop import estimators
from vardrop import functional as F


def tensors(dtype=torch.float64):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
    variance, variance_bias = torch.rand(3, 4) + 0.1, torch.rand(3) + 0.1
    learned = [t.to(dtype).requires_grad_() for t in (x, weight, bias, variance, variance_bias)]
    return *learned, torch.randn(5, 3, dtype=dtype)


def in_parts(x, weight, bias, variance, variance_bias, noise):
    spread = functional.linear(x * x, variance, variance_bias)
    return functional.linear(x, weight, bias) + spread.sqrt() * noise


def test_first_and_second_derivatives():
    arguments = tensors()
    wave = lambda *a: F.dense_output(*a).sin()
    assert gradcheck(wave, arguments)
    assert gradgradcheck(wave, arguments)


@pytest.mark.parametrize("frozen", range(5))
def test_the_parts_and_what_needs_no_gradient(frozen):
    arguments = tensors()
    arguments[frozen].requires_grad_(False)
    learned = [t for t in arguments if t.requires_grad]
    fused, parts = F.dense_output(*arguments), in_parts(*arguments)
    torch.testing.assert_close(fused, parts)
    torch.testing.assert_close(
        torch.autograd.grad(fused.sin().sum(), learned),
        torch.autograd.grad(parts.sin().sum(), learned),
    )


def test_no_bias():
    x, weight, _, variance, variance_bias, noise = tensors()
    fused = F.dense_output(x, weight, None, variance, variance_bias, noise)
    torch.testing.assert_close(fused, in_parts(x, weight, None, variance, variance_bias, noise))


def used(monkeypatch, run):
    """Whether a forward pass takes the fused function."""
    calls = []

    def watched(*args):
        calls.append(args)
        return F.dense_output(*args)

    monkeypatch.setattr(estimators, "dense_output", watched)
    assert run().isfinite().all()
    return bool(calls)


def test_used_for_rows_of_float32_alone(monkeypatch):
    layer = vd.convert(nn.Linear(4, 3), vd.sparse_vd())
    rows = torch.randn(5, 4)
    assert used(monkeypatch, lambda: layer(rows))
    assert not used(monkeypatch, lambda: layer(torch.randn(2, 5, 4)))
    assert not used(monkeypatch, lambda: layer(rows, noise=torch.randn(3)))
    assert not used(monkeypatch, lambda: torch.vmap(layer, randomness="different")(rows[None]))
    with torch.autocast("cpu", torch.bfloat16):
        assert not used(monkeypatch, lambda: layer(rows))
    assert not used(monkeypatch, lambda: layer.double()(rows.double()))


def test_one_channel_keeps_the_layout_of_its_kernel():
    net = vd.convert(nn.Conv2d(1, 6, 3), vd.sparse_vd()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8)
    plain = functional.conv2d(x, net.weight, net.bias)
    for estimator in (vd.local_reparameterization, vd.weight_sample, vd.flipout):
        net.estimator = estimator
        assert net(x).stride() == plain.stride(), estimator
