"""`Ensemble`: a predictor whose draws are the outputs of several models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from vardrop._core.calls import Batch
from vardrop._core.errors import VardropError
from vardrop.prediction.eval_copy import is_stochastic, make_eval_copy
from vardrop.prediction.predictor import Predictor
from vardrop.prediction.strategies import DrawStrategy, MemberDraws


class Ensemble(Predictor):
    """The equal mixture of the predictive distributions of several models.

    Members may be plain, noisy or shrunken models with outputs of one shape. A plain member
    contributes its output, a noisy one draws of its output. It is called, calibrated, frozen and
    exported as every `Predictor` is.

    Args:
        models: the members.
        samples: number of draws of noisy members together; plain members have one output each.
        options: `likelihood`, `conformal`, `level`, `units`, `memory`, `keep` and `output`, as for
            `Predictor`.

    >>> import torch, vardrop as vd
    >>> ensemble = vd.Ensemble([torch.nn.Linear(4, 3) for _ in range(5)])
    >>> ensemble(torch.randn(2, 4))
    Prediction(2 examples, Categorical, 5 draws)

    Lakshminarayanan, Pritzel & Blundell 2017, "Simple and scalable predictive uncertainty
    estimation using deep ensembles", sec. 2.4.
    """

    each: int  # draws of a member
    checks_net = False

    def __init__(self, models: Sequence[nn.Module], samples: int = 32, **options: Any) -> None:
        members = list(models) if isinstance(models, Sequence | nn.ModuleList) else []
        if not members or not all(isinstance(m, nn.Module) for m in members):
            raise VardropError(f"Expected `models` to be a list of models, but got {models!r}.")
        is_noisy = any(map(_has_noise, members))
        self.__dict__["each"] = -(-samples // len(members)) if is_noisy else 1
        super().__init__(nn.ModuleList(members), self.each * len(members), **options)

    def _make_strategy(self) -> DrawStrategy:
        members: list[nn.Module | Callable[[Batch], DrawStrategy]] = []
        for member in self._model.children():
            if _has_noise(member):
                predictor = Predictor(member, self.each, memory=self.memory, output=self.pick)
                members.append(predictor.strategy_for)
            else:
                members.append(make_eval_copy(member, noise=False))
        return MemberDraws(members, self.pick, self.each)


def _has_noise(model: nn.Module) -> bool:
    return any(map(is_stochastic, model.modules()))
