"""A layer kind of a third party, with two weights, through `register_layer` alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import vardrop as vd
from experiments.diagnostics import noise_level
from tests.refusals import assert_refused
from vardrop.compression import zero_pruned_weights
from vardrop.layers import NOISY_TYPES
from vardrop.layers.alpha import sparsity
from vardrop.prediction.kappa import kappa
from vardrop.testing import CHECKS, RECIPES


class GatedLinear(nn.Module):
    """y = (a x + b) sigmoid(c x): a gated linear unit with one bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.value = nn.Parameter(torch.empty(outputs, inputs))
        self.control = nn.Parameter(torch.empty(outputs, inputs))
        self.offset = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for tensor in (self.value, self.control):
            nn.init.kaiming_uniform_(tensor, a=5**0.5)
        nn.init.zeros_(self.offset)

    def forward(self, x: Tensor) -> Tensor:
        value = functional.linear(x, self.value, self.offset)
        return value * functional.linear(x, self.control).sigmoid()


class NoisyGatedLinear(vd.Variational, GatedLinear):
    @classmethod
    def weights_of(cls, layer):
        dense = vd.Linear.axes
        return {"value": dense, "control": dense}

    bias_names = ("offset",)

    @property
    def num_inputs(self) -> int:
        return self.in_features

    @property
    def num_outputs(self) -> int:
        return self.out_features

    def scale_units(self, factor: Tensor, side: str) -> None:
        with torch.no_grad():
            if side == "input":
                super().scale_units(factor, side)
            else:  # only the first factor is linear
                self.value.mul_(factor.unsqueeze(1))
                self.offset.mul_(factor)

    def forward(self, x: Tensor, noise=(None, None)) -> Tensor:
        x, linear = self.apply_gate("input", x), functional.linear
        value = self.product(linear, (x,), noise[0], weight="value", bias="offset")
        control = self.product(linear, (x,), noise[1], weight="control", bias="none")
        return self.apply_gate("output", value * control.sigmoid())


@pytest.fixture(autouse=True)
def registered():
    vd.register_layer(GatedLinear, NoisyGatedLinear)
    yield
    del NOISY_TYPES[GatedLinear]


def make() -> GatedLinear:
    return GatedLinear(6, 4)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("recipe", ["sparse_vd", "bayes_by_backprop-flipout", "concrete_dropout", "bayesian_compression"])  # fmt: skip
def test_the_contract(check, recipe):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    CHECKS[check](make, (x,), RECIPES[recipe])


def net() -> nn.Sequential:
    return vd.convert(nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 3)), vd.sparse_vd())


def test_each_weight_is_reported_by_its_name():
    noisy = net()
    assert set(vd.log_alpha(noisy)) == {"0.value", "0.control", "2"}
    assert set(vd.relevance(noisy)) == {"0.value", "0.control", "2"}
    assert sparsity(noisy).weights == {"0.value": 24, "0.control": 24, "2": 12}
    keys = {"0.value_log_sigma2", "0.control_log_sigma2", "2.log_sigma2"}
    assert keys == {k for k in noisy.state_dict() if "log_sigma2" in k}


def test_the_kl_is_that_of_both_weights():
    layer = vd.convert(make(), vd.bayes_by_backprop())
    apart = vd.convert(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), vd.bayes_by_backprop())
    apart[0].weight.data.copy_(layer.value)
    apart[1].weight.data.copy_(layer.control)
    torch.testing.assert_close(vd.kl(layer), vd.kl(apart))


def test_functions_are_drawn_and_predictions_vary():
    noisy, x = net(), torch.randn(7, 6)
    drawn = vd.draw(noisy, seed=0)
    assert type(drawn[0]) is GatedLinear
    assert not torch.equal(drawn[0].value, noisy[0].value)
    assert not torch.equal(drawn[0].control, noisy[0].control)
    assert vd.predict(noisy, x, samples=4).probs.shape == (7, 3)


def test_it_is_saved_and_loaded(tmp_path):
    noisy = net()
    vd.save_noisy(noisy, tmp_path / "net")
    again = vd.load_noisy(tmp_path / "net", nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 3)))
    for name, value in noisy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_dead_weights_of_both_are_masked():
    noisy = net()
    noisy[0].control_log_sigma2.data[0] = 20.0
    plain, _ = zero_pruned_weights(noisy)
    assert type(plain[0]) is GatedLinear
    assert (plain[0].control[0] == 0).all()
    assert (plain[0].value != 0).all()


def test_the_swap_to_variances_takes_both():
    noisy = net()
    assert vd.to_variance(noisy, include="0").weights == {"0": 48}
    assert not noisy[0].value.any()
    assert not noisy[0].control.any()


def test_kappa_of_both():
    found = kappa(net(), [(torch.randn(4, 6), torch.randint(3, (4,)))])
    shapes = {k: tuple(v.shape) for k, v in found.items()}
    assert shapes == {"0.value": (4, 6), "0.control": (4, 6), "2": (3, 4)}


def test_what_needs_one_product_refuses_two():
    x = torch.randn(2, 6)
    assert_refused("one product.*value, control", noise_level, net(), x)


def test_a_second_registration_is_refused():
    class Another(NoisyGatedLinear):
        pass

    with pytest.raises(vd.VardropError, match="GatedLinear and Another to be registered once"):
        vd.register_layer(GatedLinear, Another)


def test_what_is_no_layer_is_refused():
    assert_refused("`plain` to be a type of module.*3", vd.register_layer, 3, NoisyGatedLinear)
    with pytest.raises(vd.VardropError, match="`noisy` to be a subclass of.*class NoisyTanh"):
        vd.register_layer(nn.Tanh, NoisyGatedLinear)
