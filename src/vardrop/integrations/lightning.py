"""Lightning: the ELBO as a LightningModule, the weight of its KL and its noise by callbacks."""

from __future__ import annotations

from vardrop._core.errors import VardropError, import_optional

import_optional("lightning.pytorch", "lightning")

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from vardrop._core.checks import check_number, check_type
from vardrop._core.rng import process_noise
from vardrop.noisy import log_alpha, relevance
from vardrop.objective import ELBO, parameter_groups
from vardrop.objective.schedules import Schedule
from vardrop.prediction import predict

Optimizers = Callable[[list[dict[str, Any]]], Any]


class LightningELBO(LightningModule):
    """An ELBO to hand to a Lightning Trainer; batches are (x, y) or (x, y, weight).

    Training minimises the negative ELBO and logs `loss`, `nll`, `kl` and `beta`. Validation and
    test run without noise and log `val_nll` and `test_nll`, whatever beta is. `trainer.predict`
    gives of every batch `probs` (or `mean`), `aleatoric` and `epistemic`, with the noise on. Of
    several processes, every one draws its own noise, though `seed_everything` seeds them alike
    (see `vardrop._core.rng.process_noise`).

    Args:
        elbo: the objective; its net and likelihood are saved in the checkpoints.
        lr: the learning rate of Adam.
        noise_lr: that of the noise; `lr` by default.
        optimizers: makes another optimizer, from the two parameter groups of
            `vardrop.parameter_groups`; what it returns may be anything that
            `configure_optimizers` may.
        samples: how many draws `trainer.predict` takes.

    >>> import torch, vardrop as vd
    >>> from vardrop.integrations.lightning import LightningELBO
    >>> elbo = vd.ELBO(vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd()), vd.Categorical(), 100)
    >>> module = LightningELBO(elbo, lr=1e-3)
    >>> module(torch.randn(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        elbo: ELBO,
        lr: float = 1e-3,
        noise_lr: float | None = None,
        optimizers: Optimizers | None = None,
        samples: int = 32,
    ) -> None:
        super().__init__()
        check_type("elbo", elbo, ELBO, "a vardrop.ELBO")
        check_number("lr", lr, above=0)
        self.elbo, self.lr, self.noise_lr = elbo, lr, noise_lr
        self.optimizers_of, self.samples = optimizers, samples

    def forward(self, x: Any) -> Any:
        """The net on a batch."""
        return self.elbo.outputs(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The negative ELBO of a batch."""
        with self._process_noise():
            parts = self.elbo(*batch)
        logs = {"loss": parts.loss, "nll": parts.nll, "kl": parts.kl, "beta": self.elbo.beta}
        self.log_dict({k: v.detach() for k, v in logs.items()}, batch_size=len(batch[1]))
        return parts.loss

    def _process_noise(self) -> AbstractContextManager[None]:
        """Other noise in every process that gets other batches, however they were seeded."""
        strategy = getattr(self._trainer, "strategy", None)
        place = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return process_noise(place.get("rank", 0), place.get("num_replicas", 1), self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The NLL of a batch without noise."""
        self._fit("val_nll", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """The NLL of a batch without noise."""
        self._fit("test_nll", batch)

    def _fit(self, name: str, batch: Any) -> None:
        x, y = batch[:2]
        parts = self.elbo(x, y)  # in evaluation mode
        self.log(name, parts.nll, batch_size=len(y), sync_dist=True, prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """The probabilities or means of a batch, and how sure they are.

        Lightning moves what it is given from device to device, tensor by tensor: so these are
        tensors. `vardrop.predict(module.elbo, loader)` gives all of the distribution.
        """
        prediction = predict(
            self.elbo, batch[0] if isinstance(batch, tuple | list) else batch, self.samples, keep=0
        )
        answer = {"probs": prediction.probs} if prediction.classifies else {"mean": prediction.mean}
        return answer | {"aleatoric": prediction.aleatoric, "epistemic": prediction.epistemic}

    def configure_optimizers(self) -> Any:
        """Adam, or what `optimizers` makes; weight decay leaves the noise alone."""
        groups = parameter_groups(self.elbo, self.lr, self.noise_lr)
        return (
            torch.optim.Adam(groups) if self.optimizers_of is None else self.optimizers_of(groups)
        )


class KLWarmUp(Callback):
    """Sets the weight of the KL at every step, by a function of the epoch.

    Args:
        schedule: such as `vardrop.linear_warmup(5, 20)`; epochs count in fractions.
    """

    def __init__(self, schedule: Schedule) -> None:
        if not callable(schedule):
            raise VardropError(
                f"Expected `schedule` to be a function of the epoch, but got {schedule!r}. "
                "Use vardrop.linear_warmup(start, end)."
            )
        self.schedule = schedule

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before each step."""
        done = batch_idx / max(trainer.num_training_batches, 1)
        _elbo(pl_module).set_beta(self.schedule(trainer.current_epoch + done))


class NoiseLog(Callback):
    """Logs at the end of every epoch the part that each method would prune, and mean log alpha."""

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After each epoch."""
        net = _elbo(pl_module).net
        masks = [r.kept for r in relevance(net).values()]
        alphas = list(log_alpha(net).values())
        if masks:
            total = sum(k.numel() for k in masks)
            pruned = 1 - sum(float(k.sum()) for k in masks) / total
            pl_module.log("sparsity", pruned, sync_dist=True)
        if alphas:
            mean = torch.cat([a.flatten() for a in alphas]).mean()
            pl_module.log("log_alpha", mean, sync_dist=True)


def _elbo(module: LightningModule) -> ELBO:
    elbo = getattr(module, "elbo", None)
    check_type("pl_module.elbo", elbo, ELBO, "a vardrop.ELBO, as LightningELBO has")
    assert isinstance(elbo, ELBO)
    return elbo
