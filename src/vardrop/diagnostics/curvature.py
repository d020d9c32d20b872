"""When may a weight be replaced by its mean? Its variance times the curvature of log p says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from vardrop.checks import check_integer, check_type
from vardrop.diagnostics.passes import Loader, batches, evaluating
from vardrop.errors import VardropError
from vardrop.functional.curvature import diagonal_hessian, hutchinson_diagonal
from vardrop.layers import Variational
from vardrop.noisy import noisy_modules, sampling


def kappa(
    net: nn.Module,
    loader: Loader,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    probes: int | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """How much the noise of each weight matters, averaged over examples.

        kappa_ij = sigma_ij^2 d^2 log p(y | x, W) / dw_ij^2   at W = E w

    Half of it is what the noise of the weight alone adds to E log p, to second order. A weight with
    a small |kappa| may be replaced by its mean.

    Args:
        net: a net with noisy weights; evaluated in eval mode at its means.
        loader: batches (x, y).
        loss: mean negative log-likelihood of a batch, (output, target) -> scalar.
        probes: None for the exact diagonal (one row of the Hessian a weight: small layers), or how
            many random signs to average a batch and layer, unbiased.
        generator: of the signs; torch's global one where None.

    Returns:
        A tensor in the shape of its weight for each noisy layer, by name; a tied weight once.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1, bias=False), vd.bayes_by_backprop(log_sigma2=0.0))
    >>> half_square = lambda output, y: 0.5 * (output - y).square().sum(1).mean()
    >>> kappa(net, [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))], half_square)
    {'': tensor([[-1., -9.]])}

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks".
    """
    if probes is not None:
        check_integer("probes", probes, remedy="None takes the exact diagonal.")
    check_type("generator", generator, torch.Generator | None, "a torch.Generator or None")
    layers = _noisy_layers(net)
    totals = {name: torch.zeros_like(layer.weight) for name, layer in layers.items()}
    count = 0
    with evaluating(net), sampling(net, on=False), torch.enable_grad():
        for x, y in batches(loader):
            leaves = {n: m.weight.detach().clone().requires_grad_() for n, m in layers.items()}
            named = {f"{name}.weight".lstrip("."): leaf for name, leaf in leaves.items()}
            log_likelihood = -loss(functional_call(net, named, (x,)), y)
            for name, leaf in leaves.items():
                if probes is None:
                    (curvature,) = diagonal_hessian(log_likelihood, [leaf])
                else:
                    # A layer at a time: signs on other layers would only add variance.
                    (curvature,) = hutchinson_diagonal(log_likelihood, [leaf], probes, generator)
                totals[name] += curvature.detach() * len(y)
            count += len(y)
    if count == 0:
        raise VardropError("Expected `loader` to yield batches, but got none.")
    return {n: total / count * layers[n].variance().detach() for n, total in totals.items()}


def _noisy_layers(net: nn.Module) -> dict[str, Variational]:
    found: dict[int, tuple[str, Variational]] = {}
    for name, module in noisy_modules(net).items():
        if isinstance(module, Variational) and module.posterior is not None:
            found.setdefault(id(module.weight), (name, module))
    if not found:
        raise VardropError(
            "Expected `net` to have noisy weights, but got gates or heads only. "
            "Convert it with a posterior, such as vardrop.sparse_vd()."
        )
    return dict(found.values())
