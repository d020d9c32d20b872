"""Lightning: the ELBO as a LightningModule, and callbacks for the KL weight and the noise."""

from __future__ import annotations

from vardrop._core.errors import VardropError, import_optional

import_optional("lightning.pytorch", "lightning")

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from vardrop._core.calls import Batch
from vardrop._core.checks import check_number, check_type
from vardrop._core.rng import process_noise
from vardrop.noisy import log_alpha, relevance
from vardrop.objective import ELBO, parameter_groups
from vardrop.objective.schedules import Schedule
from vardrop.prediction import predict

LabelledBatch = tuple[Batch, Tensor] | tuple[Batch, Tensor, Tensor]


class LightningELBO(LightningModule):
    """An ELBO for a Lightning Trainer. Batches are (x, y) or (x, y, weight).

    Training minimises the negative ELBO and logs `loss`, `nll`, `kl` and `beta`. Validation and
    test run without noise and log `val_nll` and `test_nll`, which do not depend on beta.
    `trainer.predict` samples noise and returns `probs` (or `mean`), `aleatoric` and `epistemic` of
    every batch. With several processes, each draws different noise, although `seed_everything`
    gives them the same seed (see `vardrop._core.rng.process_noise`).

    Args:
        elbo: the objective. Its model and likelihood are saved in the checkpoints.
        lr: the learning rate of Adam.
        noise_lr: the learning rate of the noise. By default `lr`.
        optimizers: makes another optimizer from the two parameter groups of
            `vardrop.parameter_groups`. It may return everything that `configure_optimizers` may.
        samples: the number of draws of `trainer.predict`.

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
        optimizers: Callable[[list[dict[str, Any]]], Any] | None = None,
        samples: int = 32,
    ) -> None:
        super().__init__()
        check_type("elbo", elbo, ELBO, "a vardrop.ELBO")
        check_number("lr", lr, above=0)
        self.elbo, self.lr, self.noise_lr = elbo, lr, noise_lr
        self.optimizers_of, self.samples = optimizers, samples

    def forward(self, x: Batch) -> Any:
        """The output of the model for a batch."""
        return self.elbo.outputs(x)

    def training_step(self, batch: LabelledBatch, batch_idx: int) -> Tensor:
        """The negative ELBO of a batch."""
        # Processes with different batches draw different noise, even if they have the same seed.
        strategy = getattr(self._trainer, "strategy", None)
        place = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        with process_noise(place.get("rank", 0), place.get("num_replicas", 1), self.device):
            parts = self.elbo(*batch)
        logs = {"loss": parts.loss, "nll": parts.nll, "kl": parts.kl, "beta": self.elbo.beta}
        self.log_dict({k: v.detach() for k, v in logs.items()}, batch_size=len(batch[1]))
        return parts.loss

    def validation_step(self, batch: LabelledBatch, batch_idx: int) -> None:
        """The NLL of a batch without noise."""
        nll = self.elbo(*batch[:2]).nll  # in evaluation mode
        self.log("val_nll", nll, batch_size=len(batch[1]), sync_dist=True, prog_bar=True)

    def test_step(self, batch: LabelledBatch, batch_idx: int) -> None:
        """The NLL of a batch without noise."""
        nll = self.elbo(*batch[:2]).nll
        self.log("test_nll", nll, batch_size=len(batch[1]), sync_dist=True, prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The probabilities or means of a batch, and their uncertainty.

        Lightning moves tensors between devices, so the result is a dictionary of tensors.
        `vardrop.predict(module.elbo, loader)` returns the complete distribution.
        """
        x = batch[0] if isinstance(batch, tuple | list) else batch
        prediction = predict(self.elbo, x, self.samples, keep=0)
        names = ("probs" if prediction.classifies else "mean", "aleatoric", "epistemic")
        return {name: getattr(prediction, name) for name in names}

    def configure_optimizers(self) -> Any:
        """Adam, or the result of `optimizers`, without weight decay on the noise."""
        groups = parameter_groups(self.elbo, self.lr, self.noise_lr)
        return (self.optimizers_of or torch.optim.Adam)(groups)


class KLWarmUp(Callback):
    """Sets the weight of the KL at every step.

    Args:
        schedule: a function of the epoch, such as `vardrop.linear_warmup(5, 20)`. Within an epoch
            it gets fractions.
    """

    def __init__(self, schedule: Schedule) -> None:
        if not callable(schedule):
            raise VardropError(
                f"Expected `schedule` to be a function of the epoch, but got {schedule!r}. "
                "Use vardrop.linear_warmup(start, end)."
            )
        self.schedule = schedule

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Set the weight before each step."""
        done = batch_idx / max(trainer.num_training_batches, 1)
        _elbo(pl_module).set_beta(self.schedule(trainer.current_epoch + done))


class NoiseLog(Callback):
    """Logs the fraction of pruned weights and the mean log alpha at the end of every epoch."""

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log after each epoch."""
        net = _elbo(pl_module).net
        if masks := [r.kept for r in relevance(net).values()]:
            pruned = 1 - sum(float(k.sum()) for k in masks) / sum(k.numel() for k in masks)
            pl_module.log("sparsity", pruned, sync_dist=True)
        if alphas := [a.flatten() for a in log_alpha(net).values()]:
            pl_module.log("log_alpha", torch.cat(alphas).mean(), sync_dist=True)


def _elbo(module: LightningModule) -> ELBO:
    elbo: Any = getattr(module, "elbo", None)
    check_type("pl_module.elbo", elbo, ELBO, "a vardrop.ELBO, as in LightningELBO")
    return elbo
