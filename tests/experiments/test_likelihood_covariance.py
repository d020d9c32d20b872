"""The split of the likelihood's variance against a linear case with a known answer."""

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

import vardrop as vd
from experiments.diagnostics import likelihood_covariance

MEAN, SIGMA, SPREAD, BATCH = 0.8, 0.5, 0.6, 6
LIMIT = norm.isf(1e-6 / 2 / 8)  # eight comparisons


def output_itself(output: Tensor, target: Tensor) -> Tensor:
    return output.squeeze(1)


def linear() -> nn.Module:
    net = vd.convert(nn.Linear(1, 1, bias=False), vd.bayes_by_backprop()).double()
    with torch.no_grad():
        net.weight.fill_(MEAN)
        net.log_sigma2.fill_(2 * torch.tensor(SIGMA).log())
    return net


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    x = 1 + SPREAD * torch.randn(count, BATCH, 1, dtype=torch.float64)
    return [(x[i], x[i]) for i in range(count)]


# L_i = w x_i with x_i ~ N(1, SPREAD^2): Var = mean^2 spread^2 + sigma^2 (1 + spread^2), and two
# examples share sigma^2 only where they share the draw of w.
VARIANCE = MEAN**2 * SPREAD**2 + SIGMA**2 * (1 + SPREAD**2)


@pytest.mark.parametrize("estimator, covariance", [
    (vd.weight_sample, SIGMA**2),
    (vd.per_example, 0.0),
    (vd.local_reparameterization, 0.0),
    (vd.flipout, 0.0),
])  # fmt: skip
def test_linear_case(estimator, covariance) -> None:
    result = likelihood_covariance(linear(), batches(2000), output_itself, estimator)
    for found, expected in ((result.covariance, covariance), (result.variance, VARIANCE)):
        assert abs(found.value - expected) < LIMIT * found.standard_error
        assert found.standard_error < 0.05
    assert result.batch_size == BATCH


def test_the_parts_add_up_to_the_variance_of_the_batch_means() -> None:
    net, data = linear(), batches(50)
    torch.manual_seed(1)
    result = likelihood_covariance(net, data, output_itself, vd.weight_sample, num_data=7)
    torch.manual_seed(1)
    net.estimator = vd.weight_sample
    means = torch.stack([7 * net(x).mean() for x, _ in data])
    assert result.falling + result.constant == pytest.approx(means.var().item())
    v, c = result.variance.value, result.covariance.value
    paper = 49 * (v / BATCH + (BATCH - 1) / BATCH * c)
    assert result.falling + result.constant == pytest.approx(paper)


def test_jackknife_error_is_the_spread_over_repetitions() -> None:
    # The spread of 60 repetitions is itself known to 1 / sqrt(2 * 59) = 9 %, the mean of the
    # jackknifed errors to less; 5.5 standard errors make 50 %.
    net = linear()
    arguments = output_itself, vd.weight_sample
    runs = [likelihood_covariance(net, batches(60), *arguments).covariance for _ in range(60)]
    spread = torch.tensor([r.value for r in runs]).std().item()
    stated = torch.tensor([r.standard_error for r in runs]).square().mean().sqrt().item()
    assert stated == pytest.approx(spread, rel=0.5)


def test_default_is_cross_entropy() -> None:
    net = vd.convert(nn.Linear(3, 2), vd.bayes_by_backprop())
    data = [(torch.randn(5, 3), torch.randint(2, (5,))) for _ in range(5)]
    assert likelihood_covariance(net, data).variance.value > 0


def test_errors() -> None:
    net = linear()
    with pytest.raises(vd.VardropError, match="Expected `loss` to give one value for each"):
        likelihood_covariance(net, batches(3), lambda output, target: output.mean())
    with pytest.raises(vd.VardropError, match="Expected `loader` to yield at least 3 batches"):
        likelihood_covariance(net, batches(2), output_itself)
