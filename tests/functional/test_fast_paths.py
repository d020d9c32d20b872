"""Fast paths against the plain expressions that they replace."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

import vardrop as vd
from vardrop import functional as F
from vardrop.functional.fast import additive, switch
from vardrop.functional.fast.table import FAST_PATHS

WEIGHTS = [torch.randn(40, 30), torch.randn(40, 30) - 3]
OUTPUTS = [torch.randn(6, 5), torch.rand(6, 5) + 0.1, torch.randn(6, 5)]
ARGUMENTS = {
    "weights shared by the draws and the KL of a step": WEIGHTS, "blocked KL": WEIGHTS,
    "gradient of the KL in a compiled graph": WEIGHTS, "Gaussian output": OUTPUTS,
}  # fmt: skip


def test_every_fast_path_is_worth_its_code():
    assert all(path.factor >= 1.5 for path in FAST_PATHS.values())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_fast_path_is_its_reference(name):
    path, results = FAST_PATHS[name], []
    for function in (path.run, path.reference):
        inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in ARGUMENTS[name]]
        out = function(*inputs)
        outputs = list(out[:2]) if isinstance(out, tuple) else [out]
        loss = sum((t * t).sum() for t in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, inputs[:2])])
    for fast, plain in zip(*results, strict=True):
        # The plain expression for compilers has other fits.
        rtol = 2e-5 if "compiled" in name else 1e-5
        torch.testing.assert_close(fast, plain, rtol=rtol, atol=1e-5)


def test_reference_switches_all_of_them_off():
    with vd.reference(), vd.reference():
        assert not switch.enabled
        assert additive.additive_weights(*WEIGHTS) is None
        assert not F.fast.normal.can_look_up(WEIGHTS[0])
        mean, variance, noise = (t.clone().requires_grad_() for t in OUTPUTS)
        assert "Addcmul" in F.gaussian_output(mean, variance, noise).grad_fn.name()
    assert switch.enabled


def test_derivatives_of_the_gaussian_output():
    arguments = [t.double().requires_grad_(i < 2) for i, t in enumerate(OUTPUTS)]
    wave = lambda *a: F.gaussian_output(*a).sin()
    assert gradcheck(wave, arguments)
    assert gradgradcheck(wave, arguments)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 5, 3, 4)])
def test_an_output_over_positions_can_be_changed_in_place(shape):
    layer = vd.convert(nn.Linear(4, 3), vd.sparse_vd())
    x = torch.randn(shape, requires_grad=True)
    layer(x).relu_().sum().backward()
    assert x.grad.isfinite().all()


def test_one_channel_keeps_the_layout_of_its_kernel():
    net = vd.convert(nn.Conv2d(1, 6, 3), vd.sparse_vd()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8)
    plain = functional.conv2d(x, net.weight, net.bias)
    for estimator in (vd.local_reparameterization, vd.weight_sample, vd.flipout):
        net.estimator = estimator
        assert net(x).stride() == plain.stride(), estimator
