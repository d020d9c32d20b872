"""Sampling: the same numbers from a seed, the same distribution from every way of drawing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import vardrop as vd
from tests.prediction.nets import Wrapped
from vardrop.errors import VardropError
from vardrop.prediction import predict
from vardrop.prediction.chains import chain, chain_draws
from vardrop.prediction.cost import calls, cheaper, chunk_size, first_noisy, row_limit
from vardrop.prediction.local import local_draws
from vardrop.prediction.modes import prepared

Z = 6.0  # two-sided 2e-9; a few hundred comparisons stay below 1e-6 together
RECIPES = {
    "posterior": vd.bayes_by_backprop(log_sigma2=-2.0),
    "zero mean": vd.variance_layer(),
    "flipout": vd.Recipe(vd.AdditiveGaussian(-2.0), estimator=vd.flipout),
    "drop connect": vd.dropconnect(0.3),
    "gate": vd.binary_dropout(0.4),
    "gaussian gate": vd.gaussian_dropout(0.4),
}


def dense(recipe: vd.Recipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    return vd.convert(net, recipe or RECIPES["posterior"]).eval()


def inputs(rows: int = 4) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))


def z_score(a: Tensor, b: Tensor) -> float:
    """The largest difference of two means of draws (S, ...), in standard errors."""
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    return float(((a.mean(0) - b.mean(0)).abs() / error).max())


@pytest.mark.parametrize("draw", ["local", "weights"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_seed_gives_the_same_numbers_and_leaves_the_global_generator(
    name: str, draw: str
) -> None:
    net, x = dense(RECIPES[name]), inputs()
    state = torch.get_rng_state()
    first = predict(net, x, 12, draw=draw, seed=3, chunk=5)
    torch.rand(7)
    torch.set_rng_state(state)
    again = predict(net, x, 12, draw=draw, seed=3, chunk=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.draws, again.draws)
    assert torch.equal(first.probs, again.probs)
    assert not torch.equal(first.draws, predict(net, x, 12, draw=draw, seed=4, chunk=5).draws)


@pytest.mark.parametrize("name", RECIPES)
def test_chunks_and_ways_of_drawing_have_one_distribution(name: str) -> None:
    net, x, n = dense(RECIPES[name]), inputs(), 1000
    draws = [
        predict(net, x, n, draw=draw, chunk=chunk, keep=n, seed=seed).draws
        for seed, (draw, chunk) in enumerate([("local", 30), ("local", n), ("weights", None)])
    ]
    for other in draws[1:]:
        assert z_score(draws[0], other) < Z
        assert z_score(draws[0].square(), other.square()) < Z


def test_the_prediction_is_that_of_a_plain_loop() -> None:
    net, x, n = dense(), inputs(), 2000
    with torch.no_grad(), vd.sampling(net):
        loop = torch.stack([net(x) for _ in range(n)])
    assert z_score(loop, predict(net, x, n, draw="local", keep=n).draws) < Z


def test_local_draws_are_independent_between_examples_and_function_draws_are_not() -> None:
    net = vd.convert(nn.Linear(5, 1), RECIPES["posterior"]).eval()
    x, n = torch.ones(2, 5), 4000
    options = {"likelihood": "gaussian", "keep": n, "seed": 0}
    local = predict(net, x, n, draw="local", **options).draws.squeeze(-1)
    assert abs(torch.corrcoef(local.T)[0, 1]) < Z / math.sqrt(n)
    whole = predict(net, x, n, draw="weights", **options).draws.squeeze(-1)
    assert torch.corrcoef(whole.T)[0, 1] > 0.999


def test_reductions_equal_those_of_all_draws_at_once() -> None:
    net, x = dense(), inputs()
    p = predict(net, x, 50, draw="local", chunk=7, keep=50, seed=0)
    probs = p.draws.double().softmax(2)
    mean = probs.mean(0)
    entropy = -(mean * mean.log()).sum(1)
    aleatoric = -(probs * probs.log()).sum(2).mean(0)
    torch.testing.assert_close(p.probs.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.mean, p.draws.mean(0))
    torch.testing.assert_close(p.std, p.draws.std(0))
    torch.testing.assert_close(p.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.aleatoric.double(), aleatoric, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        p.epistemic.double(), (entropy - aleatoric).clamp(min=0), rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(p.standard_error, p.draws.softmax(2).std(0) / math.sqrt(50))
    assert p.samples.tolist() == [50] * 4


def test_probabilities_are_averaged_not_their_logarithms() -> None:
    p = predict(dense(vd.bayes_by_backprop(log_sigma2=1.0)), inputs(), 64, keep=64, seed=0)
    geometric = p.draws.log_softmax(2).mean(0).softmax(1)
    assert (p.probs - geometric).abs().max() > 0.01
    torch.testing.assert_close(p.probs, p.draws.softmax(2).mean(0))


def test_memory_does_not_grow_with_the_number_of_draws() -> None:
    net, x = dense(), inputs()
    sizes = []
    for samples in (20, 2000):
        p = predict(net, x, samples, draw="local", chunk=10, keep=10)
        fields = [v for v in vars(p).values() if isinstance(v, Tensor)]
        sizes.append(sum(v.numel() for v in fields))
    assert sizes[0] == sizes[1]


def test_the_mean_mode_is_the_weight_scaling_rule() -> None:
    net, x = dense(), inputs()
    p = predict(net, x, mode="mean")
    assert torch.equal(p.mean, net.eval()(x))
    assert p.epistemic.max() < 1e-6
    assert not p.std.any()
    assert p.samples.tolist() == [1] * 4


def test_a_loader_gives_what_its_batches_give() -> None:
    net, x = dense(), inputs(6)
    loader = [(x[:4], torch.zeros(4)), (x[4:], torch.zeros(2))]
    p = predict(net, loader, 10, draw="local", chunk=10, seed=0)
    assert len(p) == 6
    assert p.draws.shape == (10, 6, 3)
    first = predict(net, x[:4], 10, draw="local", chunk=10, seed=0)
    torch.testing.assert_close(p.probs[:4], first.probs)


def test_rows_are_split_where_one_draw_would_not_fit() -> None:
    net, x = dense(), inputs(9)
    assert row_limit(calls(net, x), 8 * 6 * 4 * 2) == 2
    p = predict(net, x, 3000, draw="local", chunk=500, memory=8 * 6 * 4 * 2, keep=3000, seed=0)
    assert z_score(p.draws, predict(net, x, 3000, draw="local", keep=3000, seed=1).draws) < Z


def test_the_tolerance_stops_each_batch_when_it_has_settled() -> None:
    net = dense()
    sure, unsure = torch.zeros(3, 5), 3 * inputs(3)
    p = predict(net, [sure, unsure], 20_000, draw="local", tolerance=0.01, seed=0)
    counts = p.samples.tolist()
    assert counts[0] < counts[-1] < 20_000
    assert p.standard_error.max() < 0.01
    assert predict(net, unsure, 64, draw="local", tolerance=1e-9).samples.tolist() == [64] * 3


def test_modes_batch_norm_and_switches_are_left_as_found() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    vd.convert(net, RECIPES["posterior"])
    net.train()
    net[1].eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    for mode in ("sample", "mean", "moments"):
        predict(net, inputs(), 8, mode=mode)
    assert [m.training for m in net] == [True, False, True, True]
    assert all(m.sampling is None for m in net if isinstance(m, vd.Linear))
    assert type(net[0].estimator) is type(vd.local_reparameterization)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("broken")


@pytest.mark.parametrize("mode", ["sample", "mean", "moments", "selective"])
def test_an_exception_passes_through_and_everything_is_restored(mode: str) -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), Failing(), nn.Linear(8, 3))
    vd.convert(net, RECIPES["posterior"]).train()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken"):
        predict(net, inputs(), mode=mode, threshold=0.1, seed=0)
    assert all(m.training for m in net.modules())
    assert all(m.sampling is None for m in net if isinstance(m, vd.Linear))
    assert all("forward" not in m.__dict__ and not m._forward_hooks for m in net.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", ["local", "weights"])
def test_a_wrong_shape_passes_through_a_chain_and_its_modes_are_restored(draw: str) -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(7, 3))
    vd.convert(net, RECIPES["posterior"]).train()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        predict(net, inputs(), draw=draw)
    assert all(m.training for m in net.modules())
    assert all(m.sampling is None for m in net if isinstance(m, vd.Linear))


class NotForVmap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean().item() > -1e9 else -x


def test_a_net_that_vmap_cannot_carry_falls_back_to_a_loop_and_says_so() -> None:
    net = nn.Sequential(nn.Linear(5, 8), NotForVmap(), nn.Linear(8, 3))
    vd.convert(net, RECIPES["posterior"])
    with pytest.warns(UserWarning, match=r"module '1' \(NotForVmap\) cannot run") as caught:
        p = predict(net, inputs(), 1000, draw="local", keep=1000)
    assert len(caught) == 1
    net[1] = nn.Identity()
    assert z_score(p.draws, predict(net, inputs(), 3000, draw="local", keep=3000).draws) < Z


def test_plain_dropout_is_noise_and_batch_norm_is_not_touched() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    net.eval()
    p = predict(net, inputs(), 4000, keep=4000, seed=0)
    assert (p.std > 0).all()
    hidden = net[1](net[0](inputs())).detach()
    expected = hidden.square() @ net[3].weight.detach().square().T  # p / (1 - p) = 1
    square = (p.draws - p.draws.mean(0)).square()
    assert ((square.mean(0) - expected).abs() / (square.std(0) / 4000**0.5)).max() < Z
    assert not net[1].running_mean.any()
    whole = predict(net, inputs(), 1000, draw="weights", keep=1000, seed=1)
    assert z_score(p.draws, whole.draws) < Z


def test_what_comes_before_the_first_noise_runs_once() -> None:
    class Counting(nn.Linear):
        rows = 0

        def forward(self, input: Tensor) -> Tensor:
            Counting.rows += len(input)
            return super().forward(input)

    net = nn.Sequential(Counting(5, 6), nn.ReLU(), nn.Linear(6, 3))
    vd.convert(net, RECIPES["posterior"], where="2")
    predict(net, inputs(), 32, draw="local")
    assert Counting.rows == 1 + 4  # one row to see the shapes, and the batch


def test_the_first_noisy_layer_is_shared_by_chunks_only_where_it_is_called_once() -> None:
    net, x = dense(), inputs()
    assert first_noisy(calls(net, x)) is net[0]
    square = nn.Linear(5, 5)
    twice = vd.convert(nn.Sequential(square, square, nn.Linear(5, 3)), RECIPES["posterior"])
    assert first_noisy(calls(twice, x)) is None
    wrapped = Wrapped(net)
    assert chain(wrapped) is None
    with torch.no_grad(), prepared(net, noise=True):
        shared = torch.cat(list(local_draws(wrapped, x, [40] * 100, net[0])))
        apart = torch.cat(list(local_draws(wrapped, x, [40] * 100, None)))
        rows = torch.cat(list(chain_draws(net, chain(net), x, [40] * 100)))
    assert z_score(shared, apart) < Z
    assert z_score(shared, rows) < Z
    assert z_score(shared.square(), rows.square()) < Z


def test_draws_lie_side_by_side_only_where_every_row_is_treated_alone() -> None:
    recipe = RECIPES["posterior"]
    nested = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 3))
    found = chain(vd.convert(nested, recipe))
    assert found is not None
    assert found.before == [nested[0]]
    assert found.first is nested[1][0]
    assert found.behind == [nested[1][1], nested[2]]
    for net, how in (
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 5)), recipe),  # the input differs by draw
        (nn.Sequential(nn.Linear(5, 5), Sum()), recipe),
        (nn.Sequential(nn.Linear(5, 5), nn.Flatten(0)), recipe),
        (nn.Sequential(nn.Linear(5, 5), nn.Softmax(0)), recipe),
        (nn.Sequential(nn.Linear(5, 5)), RECIPES["gate"]),
        (nn.Sequential(nn.Linear(5, 5)), RECIPES["flipout"]),
    ):
        assert chain(vd.convert(net, how)) is None
    hooked = vd.convert(nn.Sequential(nn.Linear(5, 5)), recipe)
    hooked[0].register_forward_hook(lambda *_: None)
    assert chain(hooked) is None


SQUARE = nn.Linear(5, 5)
IMAGES = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(2))
CHAINS = {
    "tied": (nn.Sequential(SQUARE, nn.ReLU(), SQUARE), RECIPES["posterior"], inputs()),
    "dropout": (
        nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(5)),
        RECIPES["posterior"], inputs(),
    ),
    "convolutions": (
        nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Flatten(),
            nn.Linear(4, 3),
        ),
        vd.Recipe(vd.AdditiveGaussian(-2.0), noisy_bias=True), IMAGES,
    ),
    "zero means": (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten()),
        RECIPES["zero mean"], IMAGES,
    ),
    "one channel": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)),
        RECIPES["posterior"], IMAGES[:, :1],
    ),
    "sequences": (
        nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)),
        RECIPES["posterior"], IMAGES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_draws_side_by_side_have_the_distribution_of_a_loop(name: str) -> None:
    net, recipe, x = CHAINS[name]
    vd.convert(net, recipe).train()
    kept, n = x.clone(), 1500
    links = chain(net)
    assert links is not None
    with torch.no_grad():
        found = torch.cat(list(chain_draws(net, links, x, [n // 3] * 3)))
        assert all(m.training for m in net.modules())
        with prepared(net, noise=True):
            loop = torch.stack([net(x) for _ in range(n)])
    assert torch.equal(x, kept)  # what is overwritten is never the input
    assert z_score(found, loop) < Z
    assert z_score(found.square(), loop.square()) < Z


def test_auto_takes_local_noise_for_dense_nets_and_functions_for_large_convolutions() -> None:
    wide = vd.convert(nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 10)), vd.sparse_vd())
    found = calls(wide, torch.zeros(1, 784))
    assert cheaper(found, 256, 32, chunk_size(found, 256, 32, 2**28), True) == "local"
    assert cheaper(found, 1, 32, 32, True) == "local"
    conv = nn.Sequential(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.Conv2d(20, 50, 5))
    found = calls(vd.convert(conv, vd.sparse_vd()), torch.zeros(1, 1, 28, 28))
    assert cheaper(found, 256, 32, 1, True) == "weights"
    gated = nn.Sequential(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.Conv2d(20, 50, 5))
    found = calls(vd.convert(gated, vd.binary_dropout()), torch.zeros(1, 1, 28, 28))
    assert cheaper(found, 256, 32, 1, True) == "local"


def test_products_of_convolutions_are_counted_by_position() -> None:
    net = nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 2, groups=2))
    found = calls(net, torch.zeros(1, 2, 5, 5))
    assert [c.products for c in found] == [6 * 9 * 9, 6 * 2 * 4 * 16]
    assert [c.elements for c in found] == [6 * 9, 4 * 16]


def test_progress_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    predict(dense(), inputs(), 8, progress=True)
    assert capsys.readouterr().err.endswith("draws: 8\n")


NAN = torch.tensor([[math.nan] * 5])


@pytest.mark.parametrize(
    "x, options, match",
    [
        (inputs(), {"samples": 0}, "`samples` to be at least 1, but got 0"),
        (inputs(), {"chunk": 0}, "`chunk` to be at least 1"),
        (inputs(), {"memory": 0}, "`memory` to be at least 1"),
        (inputs(), {"keep": -1}, "`keep` to be at least 0"),
        (inputs(), {"tolerance": 0.0}, "`tolerance` to be positive"),
        (inputs(), {"mode": "exact"}, "`mode` to be one of sample, mean"),
        (inputs(), {"draw": "some"}, "`draw` to be one of auto, local, weights"),
        (inputs(), {"likelihood": "poisson"}, "`likelihood` to be one of categorical"),
        (inputs(), {"noise_std": -1.0}, "`noise_std` to be at least 0"),
        (inputs(), {"mode": "selective"}, "`threshold` to be at least 0"),
        (inputs(), {"likelihood": "heteroscedastic"}, "a mean and a log variance"),
        (NAN, {}, "`x` to be finite, but got 5 values"),
        (NAN / 0 * math.inf, {}, "`x` to be finite"),
        (torch.zeros(0, 5), {}, "`x` to have rows"),
        ([inputs(), NAN], {}, "`x` to be finite, but got 5 values"),
        ([], {}, "at least one batch, but got an empty loader"),
        ([{"x": 1}], {}, "batches to be tensors, or tuples"),
    ],
)
def test_bad_input_is_refused(x: object, options: dict[str, object], match: str) -> None:
    net = dense().train()
    with pytest.raises(VardropError, match=match):
        predict(net, x, **options)
    assert all(m.training for m in net.modules())


def test_nets_that_cannot_be_predicted_are_refused() -> None:
    with pytest.raises(VardropError, match="noisy modules or dropout, but got Linear"):
        predict(nn.Linear(5, 3), inputs())
    assert predict(nn.Linear(5, 3), inputs(), mode="mean").probs.shape == (4, 3)
    with pytest.raises(VardropError, match=r"\(N, classes, ...\), but got \(4,\)"):
        predict(nn.Sequential(dense(), Sum()), inputs())
    with pytest.raises(VardropError, match="4 rows as the input has"):
        predict(nn.Sequential(dense(), nn.Flatten(0)), inputs())
    with pytest.raises(VardropError, match="one tensor, but got tuple"):
        predict(nn.Sequential(dense(), Two()), inputs(), mode="mean")


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x
