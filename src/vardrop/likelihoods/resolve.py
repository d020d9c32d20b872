"""The model and the likelihood of an argument: an objective, or a model with a likelihood."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.errors import VardropError
from vardrop.likelihoods.base import Likelihood
from vardrop.likelihoods.categorical import Categorical


class Objective(Protocol):
    """A model with its likelihood, such as an ELBO."""

    net: nn.Module
    likelihood: Any


def check_model(net: object) -> None:
    """Raise an error unless a value is a module, and not a model with its likelihood.

    >>> import torch
    >>> check_model(torch.nn.Linear(2, 1))
    """
    check_net(net)
    if hasattr(net, "likelihood") and hasattr(net, "net"):
        raise VardropError(
            f"Expected `net` to be a model, but got {type(net).__name__}. Pass its `net`, or for "
            "the export of predictions with uncertainty vardrop.freeze of it."
        )


def resolve_likelihood(
    net: nn.Module | Objective, likelihood: Likelihood | None
) -> tuple[nn.Module, Likelihood]:
    """Return the model and the likelihood of an objective, or of a model and a likelihood.

    Args:
        net: an objective such as an ELBO, or a model.
        likelihood: overrides the likelihood of the objective. Without both it is Categorical().

    Returns:
        The model and the likelihood.

    >>> import torch
    >>> resolve_likelihood(torch.nn.Linear(2, 1), None)[1]
    Categorical()
    """
    model: Any = net
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    meaning: Any = likelihood
    if hasattr(model, "likelihood") and hasattr(model, "net"):
        meaning = model.likelihood if meaning is None else meaning
        model = model.net
    check_type("net", model, nn.Module, "a torch.nn.Module or an ELBO")
    meaning = Categorical() if meaning is None else meaning
    wanted = "one of vardrop's, such as vardrop.Categorical()"
    check_type("likelihood", meaning, Likelihood, wanted, "Pass likelihood= what the output means.")
    return model, meaning
