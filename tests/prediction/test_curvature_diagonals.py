"""Diagonals of the Hessian and of the Fisher matrix against autograd's full matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.functional.curvature import diagonal_fisher, diagonal_hessian, hutchinson_diagonal


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((12, 6), (3, 12))
    )
    x = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    return first, second, x, torch.randint(0, 3, (20,), generator=generator)


def loss(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(torch.tanh(x @ first.T) @ second.T, y)


def exact(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    full = torch.autograd.functional.hessian(lambda a, b: loss(a, b, x, y), (first, second))
    return [
        full[i][i].reshape(t.numel(), t.numel()).diagonal().view_as(t)
        for i, t in enumerate((first, second))
    ]


def test_the_exact_diagonal() -> None:
    first, second, x, y = problem()
    found = diagonal_hessian(loss(first, second, x, y), [first, second])
    for a, b in zip(found, exact(first, second, x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_probes_are_unbiased() -> None:
    first, second, x, y = problem()
    value, generator = loss(first, second, x, y), torch.Generator().manual_seed(1)
    runs = [
        hutchinson_diagonal(value, [first, second], probes=1, generator=generator)
        for _ in range(2000)
    ]
    for index, reference in enumerate(exact(first, second, x, y)):
        found = torch.stack([run[index] for run in runs])
        z = (found.mean(0) - reference).abs() / (found.std(0) / len(runs) ** 0.5)
        assert z.max() < 6.0  # 108 comparisons, below 1e-6 together


def test_linear_values_have_no_curvature() -> None:
    w = torch.ones(3, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    assert diagonal_hessian(2 * w.sum(), [w])[0].tolist() == [0.0] * 3
    assert hutchinson_diagonal(2 * w.sum(), [w])[0].tolist() == [0.0] * 3
    assert diagonal_hessian(w.pow(3).sum(), [w, other])[1].tolist() == [0.0] * 2


def test_the_fisher_diagonal_is_minus_the_expected_hessian() -> None:
    first, second, x, _ = problem()
    output = torch.relu(x @ first.T) @ second.T
    probs = output.detach().softmax(1)
    generator = torch.Generator().manual_seed(1)

    def score() -> Tensor:
        drawn = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        return functional.one_hot(drawn, 3) - probs

    runs = [diagonal_fisher(output, [first, second], score, probes=1) for _ in range(2000)]
    # The Hessian of log p, which is the same for every y in a net piecewise linear in its weights.
    value = -output.log_softmax(1)[:, 0].sum()
    for index, reference in enumerate(diagonal_hessian(value, [first, second])):
        found = torch.stack([run[index] for run in runs])
        error = (found.std(0) / len(runs) ** 0.5).clamp(min=1e-12)
        assert ((found.mean(0) - reference).abs() / error).max() < 6.0
