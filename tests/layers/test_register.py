"""A layer kind of a third party, with two weights, through `register_layer` alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from experiments.diagnostics import noise_level
from tests.nets import is_same_state, reload
from tests.refusals import assert_refused
from vardrop.compression import zero_pruned_weights
from vardrop.testing import CHECKS, RECIPES


class GatedLinear(nn.Module):
    """y = (a x + b) sigmoid(c x): a gated linear unit with one bias."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.value = nn.Parameter(torch.empty(outputs, inputs))
        self.control = nn.Parameter(torch.empty(outputs, inputs))
        self.offset = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self):
        for tensor in (self.value, self.control):
            nn.init.kaiming_uniform_(tensor, a=5**0.5)
        nn.init.zeros_(self.offset)

    def forward(self, x):
        value = functional.linear(x, self.value, self.offset)
        return value * functional.linear(x, self.control).sigmoid()


class NoisyGatedLinear(vd.Variational, GatedLinear):
    @classmethod
    def weights_of(cls, layer):
        dense = vd.Linear.axes
        return {"value": dense, "control": dense}

    bias_names = ("offset",)

    @property
    def num_inputs(self):
        return self.in_features

    @property
    def num_outputs(self):
        return self.out_features

    def scale_units(self, factor, side):
        with torch.no_grad():
            if side == "input":
                super().scale_units(factor, side)
            else:  # only the first factor is linear
                self.value.mul_(factor.unsqueeze(1))
                self.offset.mul_(factor)

    def forward(self, x, noise=(None, None)):
        x, linear = self.apply_gate("input", x), functional.linear
        value = self.product(linear, (x,), noise[0], weight="value", bias="offset")
        control = self.product(linear, (x,), noise[1], weight="control", bias="none")
        return self.apply_gate("output", value * control.sigmoid())


@pytest.fixture(autouse=True)
def registered():
    vd.register_layer(GatedLinear, NoisyGatedLinear)
    yield
    del vd.layers.NOISY_TYPES[GatedLinear]


def make():
    return GatedLinear(6, 4)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("recipe", ["sparse_vd", "bayes_by_backprop-flipout", "concrete_dropout", "bayesian_compression"])  # fmt: skip
def test_the_contract(check, recipe):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    CHECKS[check](make, (x,), RECIPES[recipe])


def net():
    return vd.convert(nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 3)), vd.sparse_vd())


def test_each_weight_is_reported_by_its_name():
    noisy = net()
    assert set(vd.log_alpha(noisy)) == {"0.value", "0.control", "2"}
    assert set(vd.relevance(noisy)) == {"0.value", "0.control", "2"}
    assert vd.sparsity(noisy).weights == {"0.value": 24, "0.control": 24, "2": 12}
    keys = {"0.value_log_sigma2", "0.control_log_sigma2", "2.log_sigma2"}
    assert keys == {k for k in noisy.state_dict() if "log_sigma2" in k}


def test_the_kl_is_that_of_both_weights():
    layer = vd.convert(make(), vd.bayes_by_backprop())
    apart = vd.convert(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), vd.bayes_by_backprop())
    apart[0].weight.data.copy_(layer.value)
    apart[1].weight.data.copy_(layer.control)
    torch.testing.assert_close(vd.kl(layer), vd.kl(apart))


def test_every_verb_takes_both_weights(tmp_path):
    noisy, x = net(), torch.randn(7, 6)
    drawn = vd.draw(noisy, seed=0)
    assert type(drawn[0]) is GatedLinear
    assert not torch.equal(drawn[0].value, noisy[0].value)
    assert not torch.equal(drawn[0].control, noisy[0].control)
    assert vd.predict(noisy, x, samples=4).probs.shape == (7, 3)
    again = reload(noisy, nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 3)), tmp_path)
    assert is_same_state(again, noisy)
    shapes = {k: v.shape for k, v in vd.kappa(noisy, [(x, torch.randint(3, (7,)))]).items()}
    assert shapes == {"0.value": (4, 6), "0.control": (4, 6), "2": (3, 4)}
    noisy[0].control_log_sigma2.data[0] = 20.0  # dead weights of one are masked
    plain, _ = zero_pruned_weights(noisy)
    assert type(plain[0]) is GatedLinear
    assert (plain[0].control[0] == 0).all()
    assert (plain[0].value != 0).all()


def test_refusals():
    another = type("Another", (NoisyGatedLinear,), {})
    assert_refused("one product.*value, control", noise_level, net(), torch.randn(2, 6))
    for match, plain, noisy in (
        ("GatedLinear and Another to be registered once", GatedLinear, another),
        ("`plain` to be a type of module.*3", 3, NoisyGatedLinear),
        ("`noisy` to be a subclass of.*class NoisyTanh", nn.Tanh, NoisyGatedLinear),
    ):
        assert_refused(match, vd.register_layer, plain, noisy)
