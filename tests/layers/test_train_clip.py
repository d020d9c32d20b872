"""`train_clip`: weights that are mostly noise are drawn around zero while a model is trained."""

import pytest
import torch
from torch import nn

import vardrop as vd

LAYERS = {"linear": (lambda: nn.Linear(5, 4), (6, 5))}
LAYERS["conv"] = (lambda: nn.Conv2d(2, 4, 3), (3, 2, 6, 6))


def layer(kind, clip=3.0):
    torch.manual_seed(0)
    made = vd.convert(LAYERS[kind][0](), vd.sparse_vd(train_clip=clip))
    made.weight.data[::2] *= 1e-4  # log alpha far above 3
    return made


@pytest.mark.parametrize("kind", LAYERS)
def test_means_of_noisy_weights_are_zero_in_training_alone(kind):
    made, x = layer(kind), torch.randn(LAYERS[kind][1])
    noise, kept = torch.zeros_like(made.eval()(x)), (vd.log_alpha(made)[""] < 3).to(x.dtype)
    assert 0 < float(kept.mean()) < 1
    expected = made.op(x, made.weight * kept, made.bias)
    torch.testing.assert_close(made.train()(x, noise), expected)
    torch.testing.assert_close(made.eval()(x, noise), made.op(x, made.weight, made.bias))


def test_clipped_means_learn_from_the_kl_alone():
    made, x = layer("linear"), torch.randn(6, 5)
    made.train()(x).square().sum().backward()
    clipped = vd.log_alpha(made)[""] >= 3
    assert not bool(made.weight.grad[clipped].any())
    assert bool(made.weight.grad[~clipped].all())
    assert bool(made.log_sigma2.grad.all())
    made.zero_grad()
    vd.kl(made).backward()
    assert bool(made.weight.grad.all())
