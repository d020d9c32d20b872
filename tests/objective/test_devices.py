"""Other devices, as far as a CPU can show them: shapes, no look at values, no kernel of the CPU."""

import copy

import pytest
import torch
from torch import nn
from torch._functorch import config

import vardrop as vd
from tests.pairs import PAIRS
from tests.running import python
from vardrop.testing import HEADS, LAYERS, RECIPES, RECURRENT


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


@pytest.mark.parametrize("name", HEADS)
def test_a_head_on_the_meta_device(name):
    net = vd.convert(nn.Sequential(nn.Linear(6, 3)), HEADS[name])
    elbo = vd.ELBO(net, vd.Categorical(), 10).to("meta")
    x, y = torch.empty(8, 6, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
    elbo(x, y).loss.backward()
    assert all(p.grad.is_meta for p in elbo.parameters() if p.grad is not None)


# Each in a process of its own kind: with gradients torch without CUDA aborts, and without them
# these cannot run: sorting and running means under a fake tensor ask for the device itself.
NOT_HERE = {"dependent_beta_bernoulli", "sampled_softmax"}
FAKE = """
import torch, vardrop as vd
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from vardrop.testing import HEADS, RECIPES

NETS = {
    (8, 6): lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
    (8, 3, 8, 8): lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
}
for name, recipe in (RECIPES | HEADS).items():
    if name in %r:
        continue
    for shape, make in NETS.items():
        elbo = vd.ELBO(vd.convert(make(), recipe), vd.Categorical(), 100)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            state = {k: torch.empty(v.shape, device="cuda") for k, v in elbo.state_dict().items()}
            batch = torch.empty(shape, device="cuda"), torch.empty(8, device="cuda").long()
            parts = torch.func.functional_call(elbo, state, batch)
        print(name, parts.loss.device.type)
"""


def test_a_forward_pass_on_a_pretended_gpu():
    run = python("-W", "ignore", "-c", FAKE % NOT_HERE)
    assert run.returncode == 0, run.stderr[-2000:]
    found = run.stdout.split("\n")[:-1]
    assert len(found) == 2 * (len(RECIPES) + len(HEADS) - len(NOT_HERE))
    assert all(line.endswith(" cuda") for line in found)


@pytest.mark.parametrize("budget", [0.0, 0.9])
def test_compile_refuses_to_draw_twice(budget):
    elbo = vd.ELBO(vd.convert(nn.Linear(4, 3), vd.sparse_vd()), vd.Categorical(), 100)
    with (
        config.patch(activation_memory_budget=budget),
        pytest.raises(vd.VardropError, match="activation_memory_budget to be 1, but got"),
    ):
        vd.compile(elbo, torch.optim.Adam(elbo.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("net", [nn.Linear(6, 4), nn.Conv2d(2, 3, 3)], ids=["dense", "conv"])
def test_gradients_do_not_depend_on_autocast_around_backward(net, dtype):
    """Products of variances in half precision would vanish."""
    net = vd.convert(copy.deepcopy(net), vd.sparse_vd())
    x = torch.randn(8, 6) if hasattr(net, "in_features") else torch.randn(4, 2, 6, 6)
    found = []
    for inside in (False, True):
        net.zero_grad()
        torch.manual_seed(0)
        loss = net(x).square().sum()
        with torch.autocast("cpu", dtype, enabled=inside):
            loss.backward()
        found.append([p.grad.clone() for p in net.parameters()])
    for alone, under in zip(*found, strict=True):
        assert torch.equal(alone, under)
