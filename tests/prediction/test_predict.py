"""Sampling: the same numbers from a seed, the same distribution from every way of drawing."""

import math
import re

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.prediction.nets import blocks, strategy_of, wrapped
from tests.refusals import assert_refused
from tests.z_scores import assert_same_moments, assert_variance, z_bound
from vardrop.prediction import predict
from vardrop.prediction.rows import RowDraws
from vardrop.prediction.strategies import LoopDraws

Z = 6.0  # two-sided 2e-9; a few hundred comparisons stay below 1e-6 together
flipout = vd.Recipe(vd.AdditiveGaussian(-2.0), estimator=vd.flipout)
RECIPES = {
    "posterior": vd.bayes_by_backprop(log_sigma2=-2.0), "zero mean": vd.variance_layer(),
    "flipout": flipout, "drop connect": vd.dropconnect(0.3), "gate": vd.binary_dropout(0.4),
    "gaussian gate": vd.gaussian_dropout(0.4),
}  # fmt: skip


def dense(recipe=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    return vd.convert(net, recipe or RECIPES["posterior"]).eval()


def inputs(rows=4):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("draw", ["estimator", "functions"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_seed_gives_the_same_numbers_and_leaves_the_global_generator(name, draw):
    net, x, state = dense(RECIPES[name]), inputs(), torch.get_rng_state()
    first = predict(net, x, 12, draw=draw, seed=3)
    torch.rand(7)
    torch.set_rng_state(state)
    again = predict(net, x, 12, draw=draw, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.draws, again.draws)
    assert torch.equal(first.probs, again.probs)
    assert not torch.equal(first.draws, predict(net, x, 12, draw=draw, seed=4).draws)


@pytest.mark.parametrize("name", RECIPES)
def test_chunks_and_ways_of_drawing_have_the_distribution_of_a_plain_loop(name):
    net, x, n = dense(RECIPES[name]), inputs(), 1000
    with torch.no_grad(), vd.sampling(net):
        loop = torch.stack([net(x) for _ in range(n)])
    functions = predict(net, x, n, draw="functions", seed=2).draws
    for draws in (blocks(net, x, n, 30, seed=0), blocks(net, x, n, n, seed=1), functions):
        assert_same_moments(loop, draws, Z)


SINGLE = vd.Recipe(vd.AdditiveGaussian(-2.0), estimator=vd.weight_sample)
WHOLE = [(vd.sparse_vd(log_sigma2=-2.0), "functions"), (SINGLE, "estimator")]


@pytest.mark.parametrize("recipe, whole", WHOLE)
def test_local_draws_are_independent_between_examples_and_whole_functions_are_not(recipe, whole):
    net, x, n = vd.convert(nn.Linear(5, 1), recipe).eval(), torch.ones(2, 5), 4000
    kinds = (predict(net, x, n, draw=d, likelihood=vd.Values(), seed=0) for d in ("local", whole))
    local, functions = (torch.corrcoef(p.draws.squeeze(-1).T)[0, 1] for p in kinds)
    assert abs(local) < z_bound(1) / math.sqrt(n)
    assert functions > 0.999
    assert net.estimator == recipe.estimator


def test_reductions_equal_those_of_all_draws_at_once():
    net, x = dense(), inputs()
    p = predict(net, x, 50, tolerance=1e-9, seed=0)  # in blocks of 25
    probs = p.draws.double().softmax(2)
    mean = probs.mean(0)
    entropy = -(mean * mean.log()).sum(1)
    aleatoric = -(probs * probs.log()).sum(2).mean(0)
    torch.testing.assert_close(p.probs.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.mean, p.draws.mean(0))
    torch.testing.assert_close(p.std, p.draws.std(0))
    torch.testing.assert_close(p.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.aleatoric.double(), aleatoric, rtol=1e-5, atol=1e-6)
    epistemic = (entropy - aleatoric).clamp(min=0)
    torch.testing.assert_close(p.epistemic.double(), epistemic, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(p.standard_error, p.draws.softmax(2).std(0) / math.sqrt(50))
    assert p.samples.tolist() == [50] * 4


def test_memory_does_not_grow_with_the_number_of_draws():
    few, many = (predict(dense(), inputs(), samples, keep=10) for samples in (20, 2000))
    size = lambda p: sum(v.numel() for v in vars(p).values() if isinstance(v, torch.Tensor))
    assert size(few) == size(many)


def test_the_mean_mode_is_the_weight_scaling_rule():
    net, x = dense(), inputs()
    p = predict(net, x, mode="mean")
    assert torch.equal(p.mean, net.eval()(x))
    assert p.epistemic.max() < 1e-6
    assert not p.std.any()
    assert p.samples.tolist() == [1] * 4


def test_a_loader_gives_what_its_batches_give():
    net, x = dense(), inputs(6)
    p = predict(net, [(x[:4], torch.zeros(4)), (x[4:], torch.zeros(2))], 10, seed=0)
    assert len(p) == 6
    assert p.draws.shape == (10, 6, 3)
    torch.testing.assert_close(p.probs[:4], predict(net, x[:4], 10, seed=0).probs)


def test_rows_are_split_where_one_draw_would_not_fit():
    net, x, memory = dense(), inputs(9), 8 * 6 * 4 * 2
    assert strategy_of(net, x, memory=memory).max_examples(x, 500) == 2
    p = predict(net, x, 500, memory=memory, seed=0)
    assert_same_moments(p.draws, predict(net, x, 500, seed=1).draws, Z)


def test_the_tolerance_stops_each_batch_when_it_has_settled():
    net, sure, unsure = dense(), torch.zeros(3, 5), 3 * inputs(3)
    p = predict(net, [sure, unsure], 20_000, tolerance=0.01, seed=0)
    counts = p.samples.tolist()
    assert counts[0] < counts[-1] < 20_000
    assert p.standard_error.max() < 0.01
    assert predict(net, unsure, 64, tolerance=1e-9).samples.tolist() == [64] * 3


def fail(net, x):
    raise RuntimeError("broken")


@pytest.mark.parametrize("mode", ["sample", "mean", "moments"])
def test_an_error_of_the_model_is_reported_and_everything_is_restored(mode):
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), Parts(fail), nn.Linear(8, 3))
    vd.convert(net, RECIPES["posterior"]).train()
    state = torch.get_rng_state()
    with pytest.raises(vd.VardropError, match="`x` .* but got RuntimeError: broken") as error:
        predict(net, inputs(), mode=mode, seed=0)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert all(m.training for m in net.modules())
    assert all(m.sampling is None for m in net if isinstance(m, vd.Linear))
    assert all("forward" not in m.__dict__ and not m._forward_hooks for m in net.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_branches_on_values_is_drawn_pass_by_pass_and_the_plan_says_so():
    branch = Parts(lambda net, x: x if x.mean().item() > -1e9 else -x)
    net = nn.Sequential(nn.Linear(5, 8), branch, nn.Linear(8, 3))
    predictor = vd.Predictor(vd.convert(net, RECIPES["posterior"]), 1000)
    reason = "one pass per draw, because its code branches on the values of tensors"
    assert predictor.plan(inputs()) == reason
    draws = predictor(inputs(), seed=0).draws
    net[1] = nn.Identity()
    assert_same_moments(draws, predict(net, inputs(), 3000, seed=1).draws, Z)


def test_plain_dropout_is_noise_and_batch_norm_is_not_touched():
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    net.eval()
    p = predict(net, inputs(), 4000, seed=0)
    assert (p.std > 0).all()
    hidden = net[1](net[0](inputs())).detach()
    expected = hidden.square() @ net[3].weight.detach().square().T  # p / (1 - p) = 1
    assert_variance(p.draws, expected)
    assert not net[1].running_mean.any()
    functions = predict(net, inputs(), 1000, draw="functions", seed=1)
    assert_same_moments(p.draws, functions.draws, Z)


def test_what_comes_before_the_first_noise_runs_once():
    seen: list[int] = []
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    net[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    vd.convert(net, RECIPES["posterior"], include="2")
    for model in (net, wrapped(net)):
        predictor = vd.Predictor(model)
        predictor(inputs())  # the first call makes the plan
        seen.clear()
        predictor(inputs())
        assert seen == [4]


def test_draws_are_further_examples_only_if_examples_are_independent():
    recipe, x = RECIPES["posterior"], inputs()
    nested = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 3))
    vd.convert(nested, recipe)
    assert not strategy_of(nested, x).plan(x).note
    hooked = vd.convert(nn.Sequential(nn.Linear(5, 5)), recipe)
    hooked[0].register_forward_hook(lambda *_: None)
    assert isinstance(strategy_of(hooked, x), RowDraws)
    for last, reason in (
        (nn.Flatten(0), "the output has shape"),
        (nn.Softmax(0), "depends on the other examples"),
        (nn.BatchNorm1d(5, track_running_stats=False), "depends on the other examples"),
    ):
        net = vd.convert(nn.Sequential(nn.Linear(5, 5), last), recipe).eval()
        strategy = strategy_of(net, x)
        assert isinstance(strategy, LoopDraws)
        assert re.search(reason, strategy.description)
    mixed = nn.Sequential(vd.convert(nn.Linear(5, 5), recipe), vd.convert(nn.Linear(5, 5), flipout))
    assert "noise of shape" in strategy_of(mixed.eval(), x).description


NAN = torch.tensor([[math.nan] * 5])


@pytest.mark.parametrize("x, options, match", [
    (inputs(), {"samples": 0}, "`samples` to be an integer of at least 1, but got 0"),
    (inputs(), {"memory": 0}, "`memory` to be an integer of at least 1"),
    (inputs(), {"keep": -1}, "`keep` to be an integer of at least 0"),
    (inputs(), {"seed": 0.5}, "`seed` to be an integer"),
    (inputs(), {"tolerance": 0.0}, "`tolerance` to be a finite number and above 0"),
    (inputs(), {"mode": "exact"}, "`mode` to be one of 'sample', 'mean'"),
    (inputs(), {"draw": "some"}, "`draw` to be one of 'estimator', 'local', 'functions'"),
    (inputs(), {"likelihood": nn.CrossEntropyLoss()}, "`likelihood` to be one of vardrop's"),
    (inputs(), {"likelihood": vd.HeteroscedasticGaussian()}, "a mean and a log variance"),
    (NAN, {}, "`x` to be finite, but got 5 values"), (NAN / 0 * math.inf, {}, "`x` to be finite"),
    (torch.zeros(0, 5), {}, "`x` to have rows"),
    ([inputs(), NAN], {}, "`x` to be finite, but got 5 values"),
    ([], {}, "at least one batch, but got an empty loader"),
    ([{"x": 1}], {}, "`x` to be a tensor, a dictionary of tensors, or batches of them"),
])  # fmt: skip
def test_bad_input_is_refused(x, options, match):
    net = dense().train()
    assert_refused(match, predict, net, x, **options)
    assert all(m.training for m in net.modules())


def test_nets_that_cannot_be_predicted_are_refused():
    assert_refused("noisy modules or dropout, but got Linear", predict, nn.Linear(5, 3), inputs())
    assert predict(nn.Linear(5, 3), inputs(), mode="mean").probs.shape == (4, 3)
    for match, last, mode in (
        (r"\(N, classes, ...\), but got \(4,\)", Parts(lambda net, x: x.sum(1)), "sample"),
        ("4 rows as the input has", nn.Flatten(0), "sample"),
        ("or an output with `logits`, but got tuple", Parts(lambda net, x: (x, x)), "mean"),
    ):
        assert_refused(match, predict, nn.Sequential(dense(), last), inputs(), mode=mode)
