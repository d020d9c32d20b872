"""`train_clip`: weights that are mostly noise are drawn around zero while a model is trained."""

import pytest
import torch
from torch import nn

import vardrop as vd


def clipped(layer):
    vd.convert(layer, vd.sparse_vd(train_clip=3.0))
    layer.weight.data[::2] *= 1e-4  # log alpha far above 3
    return layer


@pytest.mark.parametrize("layer, shape", [
    (nn.Linear(5, 4), (6, 5)), (nn.Conv2d(2, 4, 3), (3, 2, 6, 6)),
])  # fmt: skip
def test_means_of_noisy_weights_are_zero_in_training_alone(layer, shape):
    made, x = clipped(layer), torch.randn(shape)
    noise, kept = torch.zeros_like(made.eval()(x)), (vd.log_alpha(made)[""] < 3).to(x.dtype)
    assert 0 < float(kept.mean()) < 1
    torch.testing.assert_close(made.train()(x, noise), made.op(x, made.weight * kept, made.bias))
    torch.testing.assert_close(made.eval()(x, noise), made.op(x, made.weight, made.bias))


def test_clipped_means_learn_from_the_kl_alone():
    made, x = clipped(nn.Linear(5, 4)), torch.randn(6, 5)
    made.train()(x).square().sum().backward()
    noisy = vd.log_alpha(made)[""] >= 3
    assert not bool(made.weight.grad[noisy].any())
    assert bool(made.weight.grad[~noisy].all())
    assert bool(made.log_sigma2.grad.all())
    made.zero_grad()
    vd.kl(made).backward()
    assert bool(made.weight.grad.all())
