"""A noisy net as a file: it comes back whole in a fresh process, or is refused by name."""

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn

import vardrop as vd
from tests import nets
from tests.nets import reload
from tests.refusals import assert_refused, unchanged
from tests.replay import replay
from vardrop._core.files import read_tensors, write_tensors
from vardrop.testing import HEADS, RECIPES

X = torch.randn(5, 4)


def plain():
    hidden = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)
    return nn.Sequential(*hidden, nn.Linear(6, 6), nn.Linear(6, 3))


def trained(net, recipe, **where):
    """Converted, with every tensor moved away from where conversion starts it."""
    vd.convert(net, recipe, **where)
    for p in net.parameters():
        if p.requires_grad:
            p.data.add_(0.05 * torch.randn_like(p))
    for m in net.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.running_mean.data.uniform_()
    return net.eval()


@torch.no_grad()
def draws(net, x=X):
    with vd.sampling(net):
        return torch.stack([net(x) for _ in range(3)])


def same(first, second, x=X):
    assert [type(m) for m in first.modules()] == [type(m) for m in second.modules()]
    ours, theirs = first.state_dict(), second.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(t, theirs[k]) for k, t in ours.items())
    flags = [[(n, p.requires_grad) for n, p in m.named_parameters()] for m in (first, second)]
    assert flags[0] == flags[1]
    assert torch.equal(first(x), second.eval()(x))
    assert torch.equal(replay(draws, first, x), replay(draws, second, x))


@pytest.mark.parametrize("name", RECIPES | HEADS)
def test_every_recipe_comes_back(name, tmp_path):
    net, into, generator = trained(plain(), (RECIPES | HEADS)[name]), plain(), torch.get_rng_state()
    again = reload(net, into, tmp_path)
    assert again is into
    assert torch.equal(torch.get_rng_state(), generator)
    same(net, again)
    for m, n in zip(net.modules(), again.modules(), strict=True):
        for part in ("posterior", "prior", "estimator", "rule", "noise", "noisy_bias", "p"):
            assert getattr(m, part, None) == getattr(n, part, None)
    assert replay(vd.kl, net) == replay(vd.kl, again)


def test_several_recipes_and_dropout_under_the_switch(tmp_path):
    net = trained(plain(), vd.mc_dropout())
    trained(net, vd.bayesian_compression(), include="0")
    trained(net, vd.variance_layer("sign"), include="4")
    trained(net, vd.dropmax(), include="5")
    vd.save_noisy(net, str(tmp_path / "net"))
    same(net, vd.load_noisy(str(tmp_path / "net"), into=plain()))


def test_dependent_gates_come_back_with_a_frozen_base(tmp_path):
    net = trained(plain(), vd.beta_bernoulli(), include=["0", "4"])
    trained(net, vd.dependent_beta_bernoulli(), include="4")
    net[0].gate.raw_b.requires_grad_(False)
    again = reload(net, plain(), tmp_path)
    same(net, again)
    assert again[4].gate.noise == net[4].gate.noise
    assert not again[4].gate.raw_a.requires_grad
    assert not again[0].gate.raw_b.requires_grad


class Tied(nets.Tied):
    """With a second name for the decoder."""

    def __init__(self, tie=True):
        super().__init__(tie)
        self.again = self.decoder


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path):
    net, x = trained(Tied(), vd.sparse_vd()), torch.arange(6)
    again = reload(net, Tied(), tmp_path)
    tensors, _ = read_tensors(tmp_path / "net")
    assert set(tensors) == {"embedding.weight", "embedding.log_sigma2"}
    assert again.embedding.log_sigma2 is again.decoder.log_sigma2
    assert again.embedding.weight is again.decoder.weight
    same(net, again, x)
    assert replay(vd.kl, net) == replay(vd.kl, again)


def test_noise_that_was_untied_stays_untied(tmp_path):
    net = trained(Tied(), vd.sparse_vd())
    net.decoder.log_sigma2 = nn.Parameter(net.decoder.log_sigma2.detach() - 1)
    told = "log_sigma2' is tied to '.*', in the file torch.float32"
    assert_refused(told, reload, net, Tied(), tmp_path)


def own(posterior):
    """Noisy by itself: a layer, a gate, and a layer without a method."""
    layer = vd.Linear(4, 6, posterior=posterior, prior=vd.ARD())
    gate, none = vd.Gate(vd.BinaryDropout(), 6), vd.Linear(6, 6)
    names = {"layer": layer, "gate": gate, "none": none, "last": nn.Linear(6, 2)}
    return nn.Sequential(OrderedDict(names))


def test_layers_that_are_made_noisy(tmp_path):
    four, five = vd.AdditiveGaussian(-4.0), vd.AdditiveGaussian(-5.0)
    net = trained(own(four), vd.sparse_vd(), include="last")
    same(net, reload(net, own(four), tmp_path))
    told, into = "module 'layer' is Linear with .*-5.0.* in the file Linear with .*-4.0", own(five)
    assert_refused(told, vd.load_noisy, tmp_path / "net", into=into)


def replaced(index, module):
    net = plain()
    net[index] = module
    return net


UNFIT = [
    (lambda: replaced(5, nn.Linear(6, 4)), r"'5.bias' is torch.float32 \(4,\), in the file torch.float32 \(3,\).*'5.weight'"),
    (lambda: replaced(4, nn.Bilinear(6, 6, 6)), "module '4' is Bilinear .*, in the file Linear"),
    (lambda: plain()[:5], "module '5' is missing"),
    (lambda: nn.Sequential(*plain(), nn.Linear(3, 3)), "'6.weight' is not in the file"),
    (lambda: plain().double(), "'0.weight' is torch.float64 .*, in the file torch.float32"),
    (lambda: plain().to("meta"), "tensors with values, but got a meta tensor at '0.weight'"),
    (lambda: vd.convert(plain(), vd.ard()), "module '0' is Linear with recipe=.*prior=ARD"),
    (lambda: vd.convert(plain(), vd.ard(), include="5"), "module '5' is Linear with recipe=.*prior=ARD"),
    (lambda: replaced(3, nn.Dropout(0.4)), "module '3' is Dropout with rate=0.4, .* in the file Dropout with rate=0.3"),
]  # fmt: skip


@pytest.mark.parametrize("make, match", UNFIT)
@pytest.mark.parametrize("recipe", [vd.sparse_vd(), vd.variance_layer()])
def test_a_net_that_does_not_fit_is_refused_and_left(make, match, recipe, tmp_path):
    net, into = trained(plain(), vd.mc_dropout()), make()
    vd.save_noisy(trained(net, recipe, include=nn.Linear), tmp_path / "net")
    with unchanged(into, match=match):
        vd.load_noisy(tmp_path / "net", into=into)
    assert_refused("`into` to be a torch.nn.Module", vd.load_noisy, tmp_path / "net", into=None)


def test_weights_that_must_be_tied(tmp_path):
    tied, apart = (trained(Tied(tie), vd.sparse_vd()) for tie in (True, False))
    told = r"'decoder.weight' is torch.float32 .*, in the file tied to 'embedding.weight'"
    assert_refused(told, reload, tied, Tied(tie=False), tmp_path)
    told = "'decoder.weight' is tied to 'embedding.weight', in the file torch.float32"
    assert_refused(told, reload, apart, Tied(), tmp_path)


def test_files_that_are_something_else(tmp_path):
    (tmp_path / "text").write_text("x" * 100)
    write_tensors(tmp_path / "tensors", {"a": torch.ones(1)})
    for name, told in {
        "none": "File not found: .*none",
        "text": "text to be a safetensors file",
        "tensors": "a net that vardrop.save_noisy wrote, but got another",
    }.items():
        assert_refused(told, vd.load_noisy, tmp_path / name, into=plain())
    assert_refused("`net` to have noisy modules", vd.save_noisy, plain(), tmp_path / "plain")
    assert_refused("`path` to be a path, but got 3", vd.save_noisy, trained(plain(), vd.ard()), 3)
    told, path = "Expected to write .* No such file or directory", tmp_path / "no" / "net"
    assert_refused(told, vd.save_noisy, trained(plain(), vd.ard()), path)


def test_forged_descriptions_raise_nothing_else(tmp_path):
    path = tmp_path / "net"
    vd.save_noisy(trained(plain(), vd.sparse_vd()), path)
    tensors, values = read_tensors(path)
    recipe = values["modules"]["0"]["recipe"]
    for change in (
        {"modules": {"0": None}}, {"modules": {"0": {}}}, {"modules": {"9": values["modules"]["0"]}},
        {"modules": {"0": {"type": 3, "recipe": recipe}}}, {"modules": []}, {"tied": {"0.weight": []}},
        {"modules": {"0": {"type": "Linear", "recipe": recipe["posterior"]}}}, {"frozen": None},
        {"modules": {"0": {"type": "DropMax", "recipe": recipe}}}, {"format": None},
        {"modules": {"1": {"type": "Linear", "recipe": recipe}}}, {"modules": {}},
        {"tied": {"0.weight": "4.weight"}}, {"tied": {"0.log_sigma2": "4.weight"}},
    ):  # fmt: skip
        write_tensors(path, tensors, {**values, **json.loads(json.dumps(change))})
        with pytest.raises(vd.VardropError):
            vd.load_noisy(path, into=plain())


def test_other_noisy_modules_are_refused(tmp_path):
    net = nn.ModuleDict({"x": type("Noise", (vd.noisy.Noisy,), {})()})
    assert_refused("but got Noise at 'x'", vd.save_noisy, net, tmp_path / "net")
