"""A frozen predictor answers as `predict` does, follows nothing, and says what it cannot freeze."""

from __future__ import annotations

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop._core.errors import VardropError
from vardrop.testing.cases import HEADS, LAYERS, RECIPES


def statistics(net: nn.Module, *shape: int) -> nn.Module:
    """The net, its BatchNorms with statistics that are not those of a beginning."""
    own = torch.Generator().manual_seed(2)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.normal_(generator=own)
            module.running_var.uniform_(0.5, 2, generator=own)
    return net


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(x + self.body(x)).mean((2, 3)))


class Tapped(nn.Module):
    """Its forward keeps what stands between the parts of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.more = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.body[0](x)
        second = self.more[0](self.body[1:](first))
        return self.out(torch.cat([first + second, self.more[1](second)], 1).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


NETS = {
    "dense": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (5,)),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU(),
            nn.MaxPool2d(2), nn.Sequential(nn.Conv2d(4, 4, 2, bias=False), nn.BatchNorm2d(4)),
            nn.Tanh(), nn.Flatten(), nn.Linear(16, 3),
        ),
        (2, 6, 6),
    ),
    "residual": (Residual, (2, 5, 5)), "tapped": (Tapped, (2, 5, 5)),
    "recurrent": (Recurrent, (6, 4)),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), nn.Flatten(),
            nn.Linear(24, 3),
        ),
        (3, 8),
    ),
}  # fmt: skip


def trained(name: str, recipe: vd.BaseRecipe | None = None) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = vd.convert(statistics(make()), recipe or vd.sparse_vd(log_sigma2=-3.0)).eval()
    return net, torch.randn(7, *shape)


def assert_same(net: nn.Module, x: Tensor, **options: object) -> None:
    try:
        expected = vd.predict(net, x, 9, seed=4, **options)
    except VardropError as error:
        refused = re.escape(str(error).partition(" Predict")[0])
        assert_refused(refused, vd.freeze(net, samples=9, **options), x, seed=4)
        return
    found = vd.freeze(net, samples=9, **options)(x, seed=4)
    torch.testing.assert_close(found.draws, expected.draws, rtol=2e-6, atol=1e-6)
    for name in ("probs", "aleatoric", "epistemic", "standard_error"):
        gap = (getattr(found, name) - getattr(expected, name)).abs().max()
        assert float(gap) <= 1e-6, (name, float(gap))


@pytest.mark.parametrize("options", [{}, {"draw": "functions"}, {"mode": "moments"}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_method_is_frozen_as_it_predicts(recipe: str, options: dict[str, str]) -> None:
    assert_same(*trained("dense", RECIPES[recipe]), **options)


@pytest.mark.parametrize("options", [{}, {"draw": "functions"}, {"mode": "moments"}], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_every_net_is_frozen_as_it_predicts(name: str, options: dict[str, str]) -> None:
    assert_same(*trained(name), **options)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv2d_depthwise", "conv3d"])
@pytest.mark.parametrize("recipe", ["sparse_vd", "variance_layer", "own-noisy_bias"])
def test_convolutions_of_every_shape(name: str, recipe: str) -> None:
    case = LAYERS[name]
    net = nn.Sequential(case.make(), nn.Flatten())
    vd.convert(net, RECIPES[recipe]).eval()
    for options in ({}, {"mode": "moments"}):
        assert_same(net, *case.inputs(), **options)


@pytest.mark.parametrize("head", HEADS)
def test_heads(head: str) -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    net = vd.convert(net, HEADS[head]).eval()
    assert_same(net, torch.randn(6, 5))


def test_other_draws_and_likelihoods() -> None:
    recipe = vd.bayes_by_backprop(estimator=vd.weight_sample)
    assert_same(*trained("dense", recipe), draw="local")
    assert_same(*trained("dense"), likelihood=vd.Categorical(temperature=2.0))
    assert_same(*trained("dense"), likelihood=vd.Bernoulli())
    net = vd.convert(nn.Linear(5, 2), vd.bayes_by_backprop()).eval()
    elbo, x = vd.ELBO(net, vd.Gaussian(0.3, learned=True), num_data=10).eval(), torch.randn(4, 5)
    expected, predictor = vd.predict(elbo, x, seed=1), vd.freeze(elbo)
    assert torch.equal(predictor(x, seed=1).std, expected.std)
    assert predictor.output_names[0] == "mean"
    elbo.likelihood.log_std.data.add_(1.0)
    assert torch.equal(predictor(x, seed=1).std, expected.std)


@pytest.mark.parametrize("mode", ["sample", "moments"])
def test_it_is_made_of_buffers_and_follows_nothing(mode: str) -> None:
    net, x = trained("norms")
    predictor = vd.freeze(net, mode=mode, samples=5)
    before = predictor(x, seed=0)
    assert not any(p.requires_grad for p in predictor.parameters())
    assert "samples=5" in repr(predictor)
    own = {t.data_ptr() for t in (*predictor.parameters(), *predictor.buffers())}
    assert not own & {t.data_ptr() for t in (*net.parameters(), *net.buffers())}
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.add_(1)
    net.train()
    assert torch.equal(predictor.train()(x, seed=0).probs, before.probs)
    assert not any(m.training for m in predictor.modules())


@pytest.mark.parametrize("name", NETS)
def test_copies_and_other_precisions(name: str) -> None:
    net, x = trained(name)
    predictor = vd.freeze(net, samples=5)
    expected = predictor(x, seed=0).probs
    for twin in (copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        assert torch.equal(twin(x, seed=0).probs, expected)
    assert vd.freeze(net, samples=5).double()(x.double(), seed=0).probs.dtype == torch.float64


def test_batches_and_loaders_are_those_of_predict() -> None:
    net, x = trained("dense")
    predictor = vd.freeze(net, samples=5)
    loaded = predictor([(part,) for part in x.split(3)], seed=2)
    assert torch.equal(loaded.probs, vd.predict(net, x.split(3), 5, seed=2).probs)
    with pytest.raises(VardropError, match="Expected `x` to be finite, but got 5 values"):
        predictor(torch.full((1, 5), float("nan")))


@pytest.mark.parametrize("name", ["dense", "residual"])
def test_one_predictor_serves_several_threads(name: str) -> None:
    net, x = trained(name)
    predictor = vd.freeze(net, samples=5)
    alone = [vd.predict(net, x, 5, seed=s).draws for s in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda s: predictor(x, seed=s).draws, range(8)))
    for a, b in zip(alone, found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_outputs_are_tensors_with_names() -> None:
    net, x = trained("dense")
    predictor = vd.freeze(net)
    found = dict(zip(predictor.output_names, predictor.outputs(x, seed=0), strict=True))
    p = vd.predict(net, x, seed=0)
    assert list(found) == ["probs", "aleatoric", "epistemic", "entropy", "lower", "upper"]
    torch.testing.assert_close(found["epistemic"], p.epistemic)
    torch.testing.assert_close(found["upper"], p.interval(0.95).upper)


def test_conformal_rules_come_along() -> None:
    net, x = trained("dense")
    held_out, y = torch.randn(50, 5), torch.randint(3, (50,))
    rule = vd.conformal(vd.predict(net, held_out, seed=0), y)
    predictor = vd.freeze(net, conformal=rule)
    found = dict(zip(predictor.output_names, predictor.outputs(x, seed=1), strict=True))
    assert torch.equal(found["set"], rule.classes(vd.predict(net, x, seed=1)))
    values = vd.convert(nn.Linear(5, 1), vd.bayes_by_backprop()).eval()
    p = vd.predict(values, held_out, likelihood=vd.Gaussian(0.5), seed=0)
    rule = vd.conformal(p, torch.randn(50, 1))
    predictor = vd.freeze(values, likelihood=vd.Gaussian(0.5), conformal=rule)
    found = dict(zip(predictor.output_names, predictor.outputs(x, seed=1), strict=True))
    torch.testing.assert_close(found["upper"], rule.interval(predictor(x, seed=1)).upper)


def test_the_answer_of_moments_to_a_row_depends_on_no_other_row() -> None:
    net, x = trained("dense")
    predictor = vd.freeze(net, mode="moments")
    torch.testing.assert_close(predictor(x).probs[2:3], predictor(x[2:3]).probs)


def test_what_cannot_be_frozen() -> None:
    net, _ = trained("dense")
    net[2].train()
    assert_refused(r"but got '2' \(Linear\) in training mode.*net.eval\(\)", vd.freeze, net)
    with pytest.raises(VardropError, match="to have noisy modules or dropout, but got Linear"):
        vd.freeze(nn.Linear(2, 2).eval())
    with pytest.raises(
        VardropError, match="`mode` to be one of 'sample', 'moments', but got 'mean'"
    ):
        vd.freeze(net.eval(), mode="mean")
    assert_refused("`samples` to be an integer of at least 1, but got 0", vd.freeze, net, samples=0)
    assert_refused("`conformal` to be a rule of vardrop.conformal", vd.freeze, net, conformal=0.9)
    recurrent, x = trained("recurrent")
    with pytest.raises(VardropError, match=r"known moments, but got 'rnn' \(LSTM\)"):
        vd.freeze(recurrent, mode="moments")(x)
