"""The Trainer of transformers with the ELBO as its objective."""

from __future__ import annotations

from vardrop._core.errors import VardropError, import_optional

import_optional("transformers", "huggingface")

import math
from collections.abc import Callable, Mapping, Sized
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from vardrop._core.calls import Pick, output_tensor
from vardrop._core.checks import check_number
from vardrop._core.rng import process_noise
from vardrop.conversion import noise_names
from vardrop.integrations.huggingface import means, read_noise, write_noise
from vardrop.likelihoods import Bernoulli, Categorical, Gaussian
from vardrop.noisy import noisy_modules
from vardrop.objective import ELBO, constant

_LABELS = "labels"
_DECODER_INPUTS = {"decoder_input_ids", "decoder_inputs_embeds"}
# The smallest learning rate of a noise scale, which is a few logarithms. With the learning rate of
# a transformer it would take more than ten thousand steps to halve.
_NOISE_LR = 1e-2


class ELBOTrainer(Trainer):
    """The Trainer of transformers with the negative ELBO of a noisy model as its loss.

        loss = mean_batch -log p(y | x, w) + beta KL(q || p) / num_data,  w ~ q

    It takes the arguments of the Trainer and the named arguments below. Weight decay does not
    change the noise, checkpoints contain it, and the parts of the loss are logged. In evaluation
    the noise is off and the loss is the NLL, which does not depend on beta. With several processes,
    each draws different noise (see `vardrop._core.rng.process_noise`).

    Args:
        likelihood: of `labels` given the output. The default follows the Trainer:
            `Gaussian(learned=True)` for `problem_type="regression"` or one label, `Bernoulli()` for
            "multi_label_classification" or float labels, else `Categorical()`, with the classes
            last if labels are per token. Its parameters are trained with the model. Pass
            `trainer.likelihood` to `vardrop.predict` after training.
        num_data: the number of training examples. By default the length of `train_dataset`.
        beta: the weight of the KL, or a function of the epoch such as
            `vardrop.linear_warmup(0, 5)`, which is evaluated at every step.
        output: selects the tensor from the output of the model. By default its `logits`.
        next_token: whether the output at a position predicts the label of the next position, as in
            causal language models.

    See docs/huggingface.md for an example.
    """

    loss_is_scaled_for_ga = False

    def __init__(
        self,
        *args: object,
        likelihood: Callable[[Any, Any], Tensor] | None = None,
        num_data: int | None = None,
        beta: float | Callable[[float], float] = 1.0,
        output: Pick = output_tensor,
        next_token: bool = False,
        **options: object,
    ) -> None:
        super().__init__(*args, **options)
        noisy_modules(self.model)  # raises if there are none
        if self.compute_loss_func is not None or self.label_smoother is not None:
            name = "compute_loss_func" if self.compute_loss_func else "label_smoothing_factor"
            raise VardropError(
                f"Expected no `{name}`, but got one: the loss is the ELBO. Pass a custom "
                "`likelihood`, a function of output and labels."
            )
        self.model_accepts_loss_kwargs = False
        problem, labels = (_config(self.model, name) for name in ("problem_type", "num_labels"))
        has_value = labels == 1 and not _generates(self.model)
        if likelihood is None and (has_value if problem is None else problem == "regression"):
            likelihood = Gaussian(learned=True)
        self.likelihood: Any = likelihood
        if isinstance(likelihood, nn.Module):
            likelihood.to(self.args.device)
        self._output, self._next = output, next_token
        if num_data is None and not isinstance(self.train_dataset, Sized):
            raise VardropError(
                f"Expected `num_data` for a `train_dataset` without a length, but got "
                f"{type(self.train_dataset).__name__} and none. It is the number of training "
                "examples, which scales the KL."
            )
        self._num_data = len(self.train_dataset) if num_data is None else num_data
        schedule = beta if callable(beta) else constant(beta)
        self.beta = schedule(0.0)
        check_number("beta", self.beta, at_least=0)
        self.add_callback(_StepCallback(self, schedule))
        self._objective: ELBO | None = None
        self._parts: dict[str, Tensor] = {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, object]:
        """The negative ELBO of a batch in training mode, its NLL in evaluation mode."""
        batch = dict(inputs)
        labels = batch.pop(_LABELS, None)
        if labels is None:
            raise VardropError(
                f"Expected `{_LABELS}` in the batch, but got {', '.join(batch)}. Give every "
                "example `label`, or a data collator that makes them."
            )
        batch = _add_decoder_inputs(self.accelerator.unwrap_model(model), batch, labels)
        returned: list[object] = []
        elbo = self._elbo(model, labels)

        def select(model_output: object) -> Tensor:
            returned.append(model_output)
            tensor = self._output(model_output)
            if self._next:
                return tensor[:, :-1]
            has_one = isinstance(elbo.likelihood, Bernoulli | Gaussian)
            return tensor.squeeze(-1) if has_one and tensor.shape == (*labels.shape, 1) else tensor

        elbo.output = select
        # The Trainer seeds all processes equally. Processes with their own batches differ in noise.
        mesh = self.accelerator.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        same = math.prod(mesh[name].size() for name in ("tp", "cp") if name in names)
        place = self.args.process_index // same, self.args.world_size // same
        with process_noise(*place, self.args.device) if model.training else nullcontext():
            parts = elbo(batch, labels[:, 1:] if self._next else labels)
        if model.training:
            self._parts = {"nll": parts.nll.detach(), "kl": parts.kl.detach()}
        loss = parts.loss if model.training else parts.nll
        return (loss, returned[-1]) if return_outputs else loss

    def _elbo(self, model: nn.Module, labels: Tensor) -> ELBO:
        """The objective of the model with its current wrapper."""
        if self._objective is None or self._objective.net is not model:
            if self.likelihood is None:
                kind, is_binary = _config(self.model, "problem_type"), labels.is_floating_point()
                is_binary = is_binary if kind is None else kind == "multi_label_classification"
                classes = Categorical(class_axis=-1 if labels.dim() > 1 else 1)
                self.likelihood = Bernoulli() if is_binary else classes
            self._objective = ELBO(model, self.likelihood, self._num_data)
            self._objective.beta = self._objective.beta.to(labels.device)
        self._objective.set_beta(self.beta)
        return self._objective

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of the Trainer without the noise, which weight decay would increase."""
        noise = noise_names(model)
        return [name for name in super().get_decay_parameter_names(model) if name not in noise]

    def create_optimizer(self, *args: object, **options: object) -> torch.optim.Optimizer:
        """The optimizer of the Trainer, with the parameters of the likelihood."""
        is_custom = self.optimizer is not None
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **options)
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        learned = [p for p in _parameters(self.likelihood).values() if id(p) not in optimized]
        if learned and is_custom:
            raise VardropError(
                f"Expected `optimizers` to have the parameters of {self.likelihood!r}, but they "
                "are missing. Add them, or let the Trainer make its optimizer."
            )
        if learned:
            lr = max(self.args.learning_rate, _NOISE_LR)
            optimizer.add_param_group({"params": learned, "weight_decay": 0.0, "lr": lr})
        return optimizer

    def log(self, logs: dict[str, float], *args: object, **options: object) -> None:
        """Log the values of the Trainer, and the parts of the loss of the latest step."""
        if "loss" in logs:
            logs = logs | {name: part.item() for name, part in self._parts.items()}
            logs["beta"] = self.beta
        super().log(logs, *args, **options)

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        model = self.accelerator.unwrap_model(self.model)
        state = model.state_dict() if state_dict is None else state_dict
        super()._save(folder, means(model, state))
        if self.args.should_save:
            learned = {name: p.tolist() for name, p in _parameters(self.likelihood).items()}
            write_noise(model, folder, likelihood=learned)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        checkpoint = read_noise(resume_from_checkpoint)  # raises before anything is loaded
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_noise(
            self.model if model is None else model, *checkpoint, resume_from_checkpoint
        )

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        checkpoint = read_noise(best)
        super()._load_best_model()
        self._load_noise(self.model, *checkpoint, best)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about missing tensors, except for the noise, which is in a separate file."""
        noise = noise_names(self.model)
        missing = [name for name in load_result.missing_keys if name not in noise]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    @torch.no_grad()
    def _load_noise(
        self, model: nn.Module, noise: dict[str, Tensor], description: dict[str, Any], path: str
    ) -> None:
        """Copy the noise of a checkpoint into a model with the same noisy modules."""
        state = model.state_dict(keep_vars=True)
        if missing := sorted(noise.keys() - state.keys()):
            raise VardropError(
                f"Expected a model with the noise of {path}, but '{missing[0]}' is missing. "
                "Convert it in the same way."
            )
        learned, stored = _parameters(self.likelihood), description.get("likelihood", {})
        if learned.keys() != stored.keys():
            raise VardropError(
                f"Expected `likelihood` to have the parameters {sorted(stored)} of {path}, but got "
                f"{self.likelihood!r}. Pass the trained likelihood."
            )
        for name, tensor in noise.items():
            state[name].copy_(tensor)
        for name, parameter in learned.items():
            parameter.copy_(torch.tensor(stored[name], dtype=torch.float64))


class _StepCallback(TrainerCallback):
    """Sets the weight of the KL before every step, and handles the parameters of the likelihood.

    These are not part of the model, whose gradients the Trainer sets to zero and
    DistributedDataParallel averages.
    """

    def __init__(self, trainer: ELBOTrainer, schedule: Callable[[float], float]) -> None:
        self.trainer, self.schedule = trainer, schedule

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object
    ) -> None:
        """Set beta for the current epoch, and the gradients to zero."""
        self.trainer.beta = self.schedule(state.epoch or 0.0)
        for parameter in _parameters(self.trainer.likelihood).values():
            parameter.grad = None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object
    ) -> None:
        """Average gradients over processes."""
        for parameter in _parameters(self.trainer.likelihood).values():
            if args.world_size > 1 and parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= args.world_size


def _parameters(likelihood: object) -> dict[str, nn.Parameter]:
    return dict(likelihood.named_parameters()) if isinstance(likelihood, nn.Module) else {}


def _config(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)


def _generates(model: nn.Module) -> bool:
    """Whether a model is a language model, for which `num_labels` has no meaning."""
    return bool(getattr(model, "can_generate", bool)())


def _add_decoder_inputs(model: Any, batch: dict[str, object], labels: Tensor) -> dict[str, object]:
    """The batch with labels shifted to the right for a decoder, as the model itself would do."""
    has_decoder = _config(model, "is_encoder_decoder")
    if not has_decoder or not _generates(model) or not _DECODER_INPUTS.isdisjoint(batch):
        return batch
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise VardropError(
            f"Expected `decoder_input_ids` in the batch of {type(model).__name__}, but got "
            f"{', '.join(batch)}. Pass a data collator that makes them: the labels, shifted to the "
            "right by one position."
        )
    shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    return {**batch, "decoder_input_ids": shifted}
