"""Likelihoods: densities in log space, one convention, one object for every verb."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import vardrop as vd
from experiments.selective import unlabelled_kappa
from tests.nets import Named
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance
from vardrop.likelihoods import Likelihood, resolve_likelihood
from vardrop.tuning.slim_report import make_score

CASES = {
    "categorical": (vd.Categorical(), (4, 3), torch.tensor([0, 2, 1, 1])),
    "pixels": (vd.Categorical(), (4, 3, 2, 2), torch.randint(3, (4, 2, 2))),
    "bernoulli": (vd.Bernoulli(), (4, 3), torch.randint(2, (4, 3)).float()),
    "gaussian": (vd.Gaussian(0.7), (4, 3), torch.randn(4, 3)),
    "learned deviation": (vd.Gaussian(0.7, learned=True), (4, 2, 3), torch.randn(4, 2, 3)),
    "heteroscedastic": (vd.HeteroscedasticGaussian(), (4, 6), torch.randn(4, 3)),
}


def reference(likelihood: Likelihood, output: Tensor, y: Tensor) -> Tensor:
    """log p of every target by torch's own distributions."""
    if isinstance(likelihood, vd.Categorical):
        return torch.distributions.Categorical(logits=output.movedim(1, -1)).log_prob(y)
    if isinstance(likelihood, vd.Bernoulli):
        return torch.distributions.Bernoulli(logits=output).log_prob(y)
    if isinstance(likelihood, vd.Gaussian):
        return torch.distributions.Normal(output, 0.7).log_prob(y)
    mean, log_variance = output.chunk(2, -1)
    return torch.distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(y)


@pytest.mark.parametrize("name", CASES)
def test_the_nll_sums_over_targets_and_averages_over_examples(name: str) -> None:
    likelihood, shape, y = CASES[name]
    output = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = -reference(likelihood, output, y).reshape(4, -1).sum(1).mean()
    torch.testing.assert_close(likelihood(output, y), expected)


@pytest.mark.parametrize("name", CASES)
def test_the_log_probability_is_that_of_a_mixture_of_draws(name: str) -> None:
    likelihood, shape, y = CASES[name]
    draws = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
    each = torch.stack([reference(likelihood, d, y).reshape(4, -1).sum(1) for d in draws])
    torch.testing.assert_close(likelihood.log_prob(draws, y), each.exp().mean(0).log())
    torch.testing.assert_close(likelihood.log_prob(draws[:1], y), each[0])


@pytest.mark.parametrize("likelihood", [vd.Categorical(), vd.Bernoulli()], ids=repr)
def test_parts_of_extreme_logits_are_finite(likelihood: Likelihood) -> None:
    draws = torch.tensor([[[1e4, -1e4], [0.0, 200.0]], [[-3e4, 3e4], [0.0, 200.0]]])
    parts = likelihood.parts(draws)
    assert parts.log_probs.isfinite().all()
    assert parts.aleatoric.isfinite().all()
    assert parts.aleatoric.min() >= 0


def test_a_class_of_probability_zero_adds_no_entropy() -> None:
    assert not vd.Categorical().parts(torch.tensor([[[-math.inf, 0.0]]])).aleatoric.any()
    assert not vd.Bernoulli().parts(torch.tensor([[-math.inf]])).aleatoric.any()


@pytest.mark.parametrize("name", CASES)
def test_samples_have_the_distribution_of_the_target(name: str) -> None:
    likelihood, shape, _ = CASES[name]
    output = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    drawn = torch.stack([likelihood.sample(output) for _ in range(2000)])
    if isinstance(likelihood, vd.Categorical):
        assert_mean(torch.stack([(drawn == c).float() for c in range(3)], 2), output.softmax(1))
    elif isinstance(likelihood, vd.Bernoulli):
        assert_mean(drawn, output.sigmoid())
    else:
        parts = likelihood.parts(output.unsqueeze(0))
        assert_mean(drawn, parts.location[0])
        assert_variance(drawn, parts.aleatoric[0])


def test_the_deviation_of_a_gaussian_is_public_and_fixed_copies_keep_it() -> None:
    learned = vd.Gaussian(0.5, learned=True)
    fixed = learned.frozen_copy()
    learned.log_std.data.fill_(math.log(2.0))
    assert (float(learned.std), float(fixed.std)) == (pytest.approx(2.0), pytest.approx(0.5))
    assert not list(fixed.parameters())
    assert repr(fixed) == "Gaussian(std=0.5)"


def test_values_have_no_density() -> None:
    draws = torch.randn(3, 2, 1)
    parts = vd.Values().parts(draws)
    assert torch.equal(parts.location, draws)
    assert not parts.aleatoric.any()
    assert_refused("with a density, but got Values", vd.Values(), draws[0], draws[0])


def test_an_objective_brings_its_likelihood() -> None:
    net = vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop())
    elbo = vd.ELBO(net, vd.Gaussian(0.3), num_data=10)
    assert resolve_likelihood(elbo, None) == (net, elbo.likelihood)
    other = vd.Values()
    assert resolve_likelihood(elbo, other) == (net, other)
    assert resolve_likelihood(net, other) == (net, other)
    own = vd.ELBO(net, lambda output, y: output.mean(), num_data=10)
    assert_refused("Expected `likelihood` to be one of vardrop's", resolve_likelihood, own, None)
    assert_refused("one of vardrop's.*but got 'gaussian'", resolve_likelihood, net, "gaussian")
    assert_refused("a torch.nn.Module or an ELBO, but got 3", resolve_likelihood, 3, None)


@pytest.mark.parametrize("likelihood, output, y, match", [
    (vd.Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "classes from 0 to 2"),
    (vd.Categorical(), torch.zeros(2, 3), torch.zeros(2), "class indices of shape"),
    (vd.Bernoulli(), torch.zeros(2, 1), torch.zeros(2), r"shape \(2, 1\)"),
    (vd.Bernoulli(), torch.zeros(2), torch.tensor([0.5, 1.0]), "zeros and ones"),
    (vd.Gaussian(), torch.zeros(2, 1), torch.zeros(2), r"shape \(2, 1\)"),
])  # fmt: skip
def test_targets_that_do_not_fit_are_refused(likelihood, output, y, match: str) -> None:
    assert_refused(match, likelihood.check_target, output, y)


# Classes of tokens: summed over the tokens that count, averaged over sequences, in every verb.


N, T, C, PAD = 6, 5, 4, -100
TOKENS = vd.Categorical(class_axis=-1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sequences(pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Inputs (N, T, 3) and classes (N, T), of which the last few of each row do not count."""
    x = torch.randn(N, T, 3, generator=generator())
    y, lengths = torch.randint(C, (N, T), generator=generator(1)), torch.tensor([5, 4, 3, 2, 1, 5])
    return x, y.masked_fill(torch.arange(T) >= lengths[:, None], pad)


def by_loop(output: Tensor, y: Tensor, pad: int = PAD) -> Tensor:
    """The NLL of every sequence, one at a time, by torch's cross entropy."""
    loss, each = nn.functional.cross_entropy, zip(output, y, strict=True)
    return torch.stack([loss(o, t, ignore_index=pad, reduction="sum") for o, t in each])


def noisy() -> nn.Module:
    """A class for every token, with weights that are drawn, so that the noise does not depend on the number of tokens."""
    recipe = vd.Recipe(vd.AdditiveGaussian(-6.0), vd.Normal(), vd.weight_sample)
    layers = {"hidden": nn.GRU(3, 8, batch_first=True), "last": nn.Linear(8, C)}
    return vd.convert(Named(lambda net, x: net.last(net.hidden(x)[0]), **layers), recipe)


@pytest.mark.parametrize("pad", [PAD, 0, C])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_nll_is_that_of_a_loop_over_sequences(temperature: float, pad: int) -> None:
    likelihood = vd.Categorical(temperature, class_axis=-1, ignore_index=pad)
    output = torch.randn(N, T, C, dtype=torch.float64, generator=generator(2), requires_grad=True)
    y = sequences(pad)[1]
    y[:, 0] = 1  # a class that counts, whatever is padding
    expected = by_loop(output / temperature, y, pad)
    torch.testing.assert_close(likelihood(output, y), expected.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(-likelihood.log_prob(output[None], y), expected, rtol=1e-12, atol=0)
    (found,) = torch.autograd.grad(likelihood(output, y), output, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected.mean(), output)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    assert not found[y == pad].any()


def test_both_places_of_the_classes_mean_the_same() -> None:
    output, y = torch.randn(3, N, T, C, generator=generator(3)), sequences()[1]
    middle = output.movedim(-1, 2)
    torch.testing.assert_close(TOKENS(output[0], y), vd.Categorical()(middle[0], y))
    torch.testing.assert_close(TOKENS.log_prob(output, y), vd.Categorical().log_prob(middle, y))
    last, first = TOKENS.parts(output), vd.Categorical().parts(middle)
    torch.testing.assert_close(last.probs, first.probs.movedim(2, -1))
    torch.testing.assert_close(last.aleatoric, first.aleatoric)
    soft = output[1].softmax(-1)
    other = vd.Categorical()(middle[0], soft.movedim(-1, 1))
    torch.testing.assert_close(TOKENS(output[0], soft), other)


def test_several_axes_of_tokens_are_summed() -> None:
    output, y = torch.randn(2, 3, 4, C), torch.randint(C, (2, 3, 4))
    expected = by_loop(output.flatten(1, 2), y.flatten(1)).mean()
    torch.testing.assert_close(TOKENS(output, y), expected)


def test_the_objective_counts_sequences() -> None:
    """loss = mean over sequences of the summed NLL + KL / number of sequences."""
    net, (x, y) = noisy(), sequences()
    out = vd.ELBO(net, TOKENS, num_data=N).eval()(x, y)
    torch.testing.assert_close(out.nll, by_loop(net(x), y).mean())
    torch.testing.assert_close(out.loss, out.nll + out.kl / N)


def test_padding_changes_nothing() -> None:
    """Longer padding, and whatever the net says there."""
    net, (x, y) = noisy(), sequences()
    longer = torch.cat([x, torch.randn(N, 4, 3)], 1), nn.functional.pad(y, (0, 4), value=PAD)
    found = [vd.predict(net, a, samples=8, likelihood=TOKENS, seed=0) for a in (x, longer[0])]
    torch.testing.assert_close(*[p.log_prob(b) for p, b in zip(found, (y, longer[1]), strict=True)])
    temperatures = [vd.fit_temperature(p, b) for p, b in zip(found, (y, longer[1]), strict=True)]
    assert temperatures[0] == pytest.approx(temperatures[1], rel=1e-6)
    tuned = [vd.calibrate(net, pair, TOKENS, samples=8, seed=0) for pair in ((x, y), longer)]
    scales = [likelihood.temperature for likelihood in tuned]
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)
    rules = [vd.conformal(p, b, 0.5).quantile for p, b in zip(found, (y, longer[1]), strict=True)]
    assert rules[0] == pytest.approx(rules[1], rel=1e-6)


def test_the_probability_of_a_sequence_is_the_mean_over_draws() -> None:
    net, (x, y) = noisy(), sequences()
    p = vd.predict(net, x, samples=8, likelihood=TOKENS, seed=0)
    each = torch.stack([-by_loop(draw, y) for draw in p.draws])
    torch.testing.assert_close(p.log_prob(y), each.logsumexp(0) - math.log(8))
    assert p.probs.shape == p.log_probs.shape == (N, T, C)
    assert p.entropy.shape == p.aleatoric.shape == p.epistemic.shape == (N, T)
    torch.testing.assert_close(p.entropy, -(p.probs * p.probs.log()).sum(-1))


def test_tokens_that_count_go_to_the_metrics() -> None:
    net, (x, y) = noisy(), sequences()
    p = vd.predict(net, x, samples=8, likelihood=TOKENS, seed=0)
    (probs, classes), which = p.select_valid(y), y != PAD
    assert torch.equal(probs, p.probs[which])
    assert torch.equal(classes, y[which])
    hits = (p.probs.argmax(-1) == y)[which].float().mean()
    torch.testing.assert_close(vd.metrics.accuracy(probs, classes), hits)
    binary = vd.predict(net, x, samples=8, likelihood=vd.Bernoulli(), seed=0)
    told = r"Expected classes for `select_valid`, but got Bernoulli\(\)"
    assert_refused(told, binary.select_valid, torch.ones(N, T, C))


def test_the_temperature_is_that_of_the_tokens_alone() -> None:
    net, (x, _) = noisy(), sequences()
    p = vd.predict(net, x, samples=4, likelihood=TOKENS, seed=0)
    y = TOKENS.sample(3 * p.log_probs)  # the right temperature is about 1 / 3
    y[:, 3:] = PAD
    found = vd.fit_temperature(p, y)
    flat = p.log_probs[y != PAD], y[y != PAD]

    def nll(temperature: float) -> float:
        return float(nn.functional.cross_entropy(flat[0] / temperature, flat[1]))

    assert nll(found) <= min(nll(found * 1.01), nll(found / 1.01))
    torch.testing.assert_close(vd.apply_temperature(p, found).sum(-1), torch.ones(N, T))
    assert repr(TOKENS.scaled(2.0)) == "Categorical(temperature=2, class_axis=-1)"
    assert TOKENS.scaled(2.0).ignore_index == PAD


def test_fine_tuning_teaches_tokens() -> None:
    x = torch.randn(64, T, 3)
    y = x.argmax(-1)
    y[:, -1] = PAD
    data = [({"x": a}, b) for a, b in zip(x.split(16), y.split(16), strict=True)]
    given = {"likelihood": TOKENS, "validation": ({"x": x}, y)}
    elbo = vd.fine_tune(noisy(), data, epochs=40, lr=0.05, **given)
    assert (elbo.num_data, elbo.likelihood.class_axis) == (64, -1)
    p = vd.predict(elbo, {"x": x}, samples=8, seed=0)
    assert float(vd.metrics.accuracy(*p.select_valid(y))) > 0.9


def test_kappa_without_labels_sees_no_padding() -> None:
    """The information of the tokens that count; 40 tokens of padding would add eight times it."""
    net, (x, y) = vd.convert(nn.Linear(3, C), vd.bayes_by_backprop()), sequences()
    longer = torch.cat([x, torch.randn(N, 40, 3)], 1), nn.functional.pad(y, (0, 40), value=PAD)

    def information(x: Tensor, y: Tensor) -> Tensor:
        found = [unlabelled_kappa(net, x, TOKENS, s, TOKENS.valid_mask(y))[""] for s in range(20)]
        return torch.stack(found).mean(0)

    torch.testing.assert_close(information(x, y), information(*longer), rtol=0.5, atol=0)


def test_the_score_of_a_supplied_net_is_that_of_the_tokens_that_count() -> None:
    """Also where there are as many tokens as classes, so that no shape tells them apart."""
    output, y = torch.randn(N, C, C, generator=generator(4)), sequences()[1][:, :C]
    expected = (output.argmax(-1) == y)[y != PAD].double().mean()
    score = make_score(nn.Identity(), [(output, y)], TOKENS)
    assert (score.name, score.measure(output, y)) == ("accuracy", float(expected))


def test_a_mask_becomes_targets() -> None:
    y, mask = torch.randint(C, (2, 3)), torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = TOKENS.masked(y, mask)
    assert torch.equal(found == PAD, mask == 0)
    assert torch.equal(found[mask == 1], y[mask == 1])
    assert torch.equal(TOKENS.masked(y, mask.bool()), found)


def test_a_mask_that_hides_everything_is_refused() -> None:
    net, (x, y) = noisy(), sequences()
    y[2] = PAD
    alone = "-100 alone in row 2.*Leave the example out"
    assert_refused(alone, vd.ELBO(net, TOKENS, num_data=N), x, y)
    assert_refused(alone, vd.predict(net, x, samples=4, likelihood=TOKENS).log_prob, y)
    shown = torch.arange(N)[:, None].expand(N, T) != 2
    assert_refused(alone, TOKENS.masked, torch.zeros(N, T).long(), shown)
    assert_refused("`mask` to have shape", TOKENS.masked, y, torch.ones(N))
    single = vd.ELBO(vd.convert(nn.Linear(3, C), vd.sparse_vd()), vd.Categorical(), num_data=N)
    assert_refused("-100 alone in row 0", single, x[:, 0], torch.full((N,), PAD))


def test_batches_of_other_lengths_are_refused() -> None:
    net, (x, _) = noisy(), sequences()
    told, batches = "one shape.*Pad all", [x, x[:, :4]]
    assert_refused(told, vd.predict, net, batches, samples=4, likelihood=TOKENS)


def test_targets_that_do_not_fit_are_refused_tokens() -> None:
    net, (x, y) = noisy(), sequences()
    last, middle = (vd.ELBO(net, one, num_data=N) for one in (TOKENS, vd.Categorical()))
    assert_refused(r"to be in 0\.\.3, but got 0\.\.4", last, x, y.masked_fill(y == 3, 4))
    assert_refused(r"indices of shape \(6, 4\).*class_axis=-1", middle, x, y)
    p = vd.predict(net, x, samples=4, likelihood=TOKENS)
    assert_refused(r"indices of shape \(6, 5\)", p.log_prob, y[:, :4])
    assert_refused("`class_axis` to be 1 or -1, but got 2", vd.Categorical, class_axis=2)
    assert_refused("`ignore_index` to be an integer", vd.Categorical, ignore_index=None)
